// Products of BF16 weights with many tokens on Hopper: wgmma, weights on its 64-row side.
//
// A block takes 128 rows, of a gated unit 64 of gate and 64 of up, and 192 tokens, or 128 where
// that fills the multiprocessors better. One thread keeps a ring of stages filled by the bulk copy
// engine, 64 columns of weights and of tokens each, a copy apiece: with copies of 1 or 2 KiB the
// engine is far slower than the tensor cores, and with four threads all of it is 2 % slower. Two
// warpgroups multiply. Blocks stay and walk through tiles of the product, all leaves of K from left
// to right with a second set of sums. The bits are those of products.cu.
#include "backend/cuda/products_gated.cuh"
#include "backend/cuda/products_wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRowTiles = kPanelTiles<BF16>;  // of 16 rows

constexpr int kRoomRows = 64 + 4;  // of a warpgroup in what sums go through, for all banks
template <int NT>
inline constexpr int kRoomFloats = NT * 2 * kRoomRows;

// NT: tiles of 8 tokens.
template <int NT>
struct Walk {
  static constexpr bool kTokensLead = false;
  static constexpr int kProducers = 1;
  static constexpr int kRowBytes = kPanelBytes, kGroupRows = kPanelBytes / 2, kGroupTokens = 0;
  static constexpr int kStageBytes = kRowBytes + NT * kTokenBytes;
  static constexpr int kStages = 200 * 1024 / kStageBytes;
  static constexpr int kRoom = kStages * kStageBytes;
  static constexpr int kBytes = kRoom + 2 * kRoomFloats<NT> * 4;
  static_assert(kBytes <= kSharedOfSm - 1024);
};
// Registers change hands between whole warpgroups only.
constexpr int kWalkThreads = kConsumers + kProducerWarps * 32;
constexpr int kNarrow = 16, kWide = 24;  // tiles of tokens of a block that walks
constexpr int kRound = 4;                // tiles of tokens that a gated unit exchanges at once
template <int NT>
struct Gate : Walk<NT> {
  static constexpr int kStages = (kRingBytes - kExchangeBytes<kRound>) / Walk<NT>::kStageBytes;
  static constexpr int kRoom = kStages * Walk<NT>::kStageBytes;
  static constexpr int kBytes = kRoom + kExchangeBytes<kRound>;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int NT>
__device__ __forceinline__ uint32_t token_bytes(const ProductTile& tile, int64_t tokens) {
  const int left = static_cast<int>((tokens + 7) / 8 - tile.token_tile);
  return static_cast<uint32_t>(min(NT, left) * kTokenBytes);
}

// Rows of a tile: of the gated unit half of gate's and half of up's.
template <class S>
inline constexpr bool kIsGate = false;
template <int NT>
inline constexpr bool kIsGate<Gate<NT>> = true;
template <class S>
inline constexpr int kTileUnits = kIsGate<S> ? kRowTiles / 2 : kRowTiles;

// finish() where all rows and tokens are there and there is no bias. A warpgroup's sums go through
// `room`, NT / 4 tiles of tokens at a time, so that neighbours write what lies side by side: stores
// as the sums lie would be requests of 32 bytes, of which a multiprocessor makes few.
template <int NT, bool kAdd>
__device__ __forceinline__ void finish_whole(const Work& w, const float (&sum)[NT][4], float* room,
                                             int64_t row, int64_t token) {
  constexpr int kTiles = NT / 4, kEach = kTiles;  // of 8 tokens; fours of rows a thread
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  const int group = static_cast<int>(threadIdx.x / 128);
  float* leave = room + lane % 4 * 2 * kRoomRows + thread / 32 * 16 + lane / 4;
  const float* take = room + thread / 16 * kRoomRows + thread % 16 * 4;
  float* out = w.out + (token + thread / 16) * w.out_stride + row + thread % 16 * 4;
  const int64_t next = 8 * w.out_stride;
  const auto meet = [&] { asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory"); };
  float4 before[2][kEach];
  const auto ask = [&](int round) {
    const float* from = out + round * kTiles * next;
#pragma unroll
    for (int n = 0; n < kEach; ++n, from += next) {
      before[round % 2][n] = *reinterpret_cast<const float4*>(from);
    }
  };
  if constexpr (kAdd) ask(0);
#pragma unroll
  for (int round = 0; round < 4; ++round) {
    if (kAdd && round < 3) ask(round + 1);
    if (round > 0) meet();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float(&v)[4] = sum[round * kTiles + j];
      float* to = leave + j * 8 * kRoomRows;
      to[0] = v[0], to[kRoomRows] = v[1], to[8] = v[2], to[kRoomRows + 8] = v[3];
    }
    meet();
    float* to = out + round * kTiles * next;
#pragma unroll
    for (int n = 0; n < kEach; ++n, to += next) {
      float4 v = *reinterpret_cast<const float4*>(take + n * 8 * kRoomRows);
      v = make_float4(__fmul_rn(v.x, w.scale), __fmul_rn(v.y, w.scale), __fmul_rn(v.z, w.scale),
                      __fmul_rn(v.w, w.scale));
      if constexpr (kAdd) {
        const float4& b = before[round % 2][n];
        v = make_float4(__fadd_rn(b.x, v.x), __fadd_rn(b.y, v.y), __fadd_rn(b.z, v.z),
                        __fadd_rn(b.w, v.w));
      }
      *reinterpret_cast<float4*>(to) = v;
    }
  }
  meet();
}

// The producer.
template <class S, int NT>
__device__ __forceinline__ void produce(Ring<S> ring, const ProductList& list, int64_t tokens,
                                        int tiles) {
  const int64_t token_step = (tokens + 7) / 8 * kTokenBytes;
  bool waited = false;
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const ProductTile tile = find_product_tile<NT, kTileUnits<S>>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int64_t cols = p.weight.cols, at = tile_at<BF16>(tile.unit, cols);
    const auto from = [&](const auto& rows) {
      fill(ring, rows, p.act + tile.token_tile * kTokenBytes, token_step,
           token_bytes<NT>(tile, tokens), static_cast<int>((cols + 63) / 64), waited);
    };
    if constexpr (kIsGate<S>) {
      from(TwoRuns<kPanelBytes / 2>{p.weight.data + at, list.of[1].weight.data + at});
    } else {
      from(OneRun<kPanelBytes>{p.weight.data + at});
    }
  }
}

// Two warpgroups: every tile's leaves from left to right.
template <class S, int NT>
__device__ __forceinline__ void walk(Ring<S> ring, const ProductList& list, int64_t tokens,
                                     int tiles, const Activations& act) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const ProductTile tile = find_product_tile<NT, kTileUnits<S>>(list, tokens, index);
    const ProductArgs& p = list.of[kIsGate<S> ? warp / 4 : tile.product];
    float total[NT][4];
    sum_leaves<S, NT>(ring, total, p.weight.cols);
    if constexpr (kIsGate<S>) {
      auto* room = reinterpret_cast<float4*>(ring.stages + S::kRoom);
      finish_gated<NT, kRound>(act, p, total, room, tile.unit, tile.unit + kRowTiles / 2,
                               tile.token_tile);
    } else {
      const Work w = work_of(p, tokens);
      const bool whole = p.bias == nullptr && (tile.unit + kRowTiles) * 16 <= w.rows &&
                         (tile.token_tile + NT) * 8 <= tokens && p.out_stride % 4 == 0 &&
                         reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
      const int group = warp / 4;
      float* room = reinterpret_cast<float*>(ring.stages + S::kRoom) + group * kRoomFloats<NT>;
      const int64_t row = (tile.unit + group * 4) * 16, token = tile.token_tile * 8;
      if (whole && w.add) {
        finish_whole<NT, true>(w, total, room, row, token);
      } else if (whole) {
        finish_whole<NT, false>(w, total, room, row, token);
      } else {
        constexpr int kAtOnce = NT % 6 == 0 ? 6 : 8;
        finish<NT, kAtOnce>(w, total, tile.unit + warp, tile.token_tile,
                            static_cast<int>(threadIdx.x % 32));
      }
    }
  }
}

#endif

template <class S, int NT>
__global__ void __launch_bounds__(kWalkThreads, 1)
    walk_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
                const __grid_constant__ Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  let_next_start();
  const Ring<S> ring = start_ring<S>(stages, full, empty, kConsumers / 32);
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (produces<S>()) produce<S, NT>(ring, list, tokens, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    wait();
    walk<S, NT>(ring, list, tokens, tiles, act);
  }
#endif
}

template <template <int> class Stage, int NT>
int launch_walk(const ProductList& list, int64_t tokens, const Activations& act) {
  using S = Stage<NT>;
  const auto kernel = walk_kernel<S, NT>;
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, NT * 8));
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  const auto blocks = static_cast<unsigned>(tiles < multiprocessors ? tiles : multiprocessors);
  return launch(kernel, dim3(blocks), dim3(kWalkThreads), S::kBytes, list, tokens, tiles, act);
}

// Wide tiles are faster, if they fill the multiprocessors as well.
template <template <int> class Stage>
int launch_walk(const ProductList& list, int64_t tokens, const Activations& act) {
  const auto cost = [&](int64_t tiles) {
    const int64_t all = list.first_block[list.count] * ceil_div(tokens, tiles * 8);
    return ceil_div(all, multiprocessors) * tiles;
  };
  return cost(kWide) * 9 <= cost(kNarrow) * 10 ? launch_walk<Stage, kWide>(list, tokens, act)
                                               : launch_walk<Stage, kNarrow>(list, tokens, act);
}

}  // namespace

bool wgmma_takes(Code code, int64_t tokens) {
  constexpr int64_t kFew = 32;
  return code == Code::kBF16 && capability == 90 && tokens > kFew;
}

int run_wgmma_gated(const ProductList& gate_and_up, int64_t tokens, const Activations& act) {
  if (tokens <= 64) return run_share_gated(gate_and_up, tokens, act);
  if (gate_takes(gate_and_up, tokens)) return run_gate(gate_and_up, tokens, act);
  ProductList list = with_blocks(gate_and_up, 16 * kRowTiles / 2);
  list.count = 1;  // the other one's rows stand beside it
  return launch_walk<Gate>(list, tokens, act);
}

int run_wgmma(const ProductList& list, int64_t tokens) {
  if (halves_take(list, tokens)) return run_halves(list, tokens);
  if (share_takes(list, tokens)) return run_share(list, tokens);
  return launch_walk<Walk>(with_blocks(list, 16 * kRowTiles), tokens, {});
}

}  // namespace freshet::cuda

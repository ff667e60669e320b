// GEMM with BF16 weights for 33 tokens or more (Hopper), by wgmma with weights on its 64-row side.
//
// A block has 128 rows (with SwiGLU 64 of gate and 64 of up) and 192 tokens, or 128 tokens if that
// balances the SMs better. One producer thread fills the pipeline with bulk copies of 64 columns,
// one copy each for weights and tokens: with copies of 1 or 2 KiB the copy engine is far slower
// than the tensor cores, and four producer threads are 2 % slower than one. Two warpgroups
// multiply. Blocks are persistent and loop over output tiles, adding all split-K slices from left
// to right in a second set of sums. The sums of a tile are written while the first slice of the
// next tile is multiplied. Bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_bf16_sm90_wgmma.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRowTiles = kPanelTiles<BF16>;  // tiles of 16 rows per block

// Per warpgroup in the epilogue's buffer; padded against bank conflicts.
constexpr int kRoomRows = 64 + 4;
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
// setmaxnreg works on whole warpgroups.
constexpr int kWalkThreads = kConsumers + kProducerWarps * 32;
constexpr int kNarrow = 16, kWide = 24;  // token tiles of a persistent block
constexpr int kRound = 2;                // token tiles that a SwiGLU epilogue exchanges at once
template <int NT>
struct GatedWalk : Walk<NT> {
  static constexpr int kStages = (kRingBytes - 2 * kExchangeBytes<kRound>) / Walk<NT>::kStageBytes;
  static constexpr int kRoom = kStages * Walk<NT>::kStageBytes;
  static constexpr int kBytes = kRoom + 2 * kExchangeBytes<kRound>;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int NT>
__device__ __forceinline__ uint32_t token_bytes(const ProductTile& tile, int64_t tokens) {
  const int left = static_cast<int>((tokens + 7) / 8 - tile.token_tile);
  return static_cast<uint32_t>(min(NT, left) * kTokenBytes);
}

// Row units of a tile: with SwiGLU, half of them gate's and half of them up's.
template <class S>
inline constexpr bool kIsGate = false;
template <int NT>
inline constexpr bool kIsGate<GatedWalk<NT>> = true;
template <class S>
inline constexpr int kTileUnits = kIsGate<S> ? kRowTiles / 2 : kRowTiles;

// The epilogue of a tile, in kParts, each between two pieces of the next tile's first slice, so
// that the tensor cores hide its cost. A part writes the first tiles of the sums, and the others
// move up, so that it is a loop: code that runs once per tile is bound by instruction fetch. Sums
// go through `room`, which is double-buffered so that a warpgroup synchronises once per part, and
// adjacent lanes write adjacent addresses. Direct stores of sums would be 32-byte requests, whose
// rate per SM is low.
template <int NT>
struct PlainEnd {
  static constexpr int kParts = 8, kTiles = NT / kParts;  // of 8 tokens
  float* out = nullptr;                                   // a thread's first four rows
  int next;                                               // 8 tokens further
  int left;                                               // tokens, from the thread's first on
  float scale;
  bool add;
  float4 before[kTiles];

  // Whether it supports the tile; if not, finish() does.
  __device__ __forceinline__ bool hold(const ProductArgs& p, const ProductTile& tile,
                                       int64_t tokens) {
    if (p.bias != nullptr || (tile.unit + kRowTiles) * 16 > p.weight.rows ||
        p.out_stride % 4 != 0 || reinterpret_cast<uintptr_t>(p.out) % 16 != 0) {
      return false;
    }
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int64_t row = (tile.unit + threadIdx.x / 128 * 4) * 16 + thread % 16 * 4;
    const int64_t token = tile.token_tile * 8 + thread / 16;
    out = p.out + token * p.out_stride + row;
    next = static_cast<int>(8 * p.out_stride);
    left = static_cast<int>(min(tokens - token, int64_t{NT * 8}));
    scale = p.scale;
    add = p.add != 0;
    return true;
  }
  __device__ __forceinline__ float* at(int tile) const { return out + int64_t{next} * tile; }
  __device__ __forceinline__ void ask() {
    if (!add) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n * 8 < left) before[n] = *reinterpret_cast<const float4*>(at(n));
    }
  }
  __device__ __forceinline__ void put(const float (&sum)[NT][4], int part, uint8_t* shared) {
    const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
    const int group = static_cast<int>(threadIdx.x / 128);
    float* room = reinterpret_cast<float*>(shared) + (group * 2 + part % 2) * (kRoomFloats<NT> / 2);
    float* leave = room + lane % 4 * 2 * kRoomRows + thread / 32 * 16 + lane / 4;
    const float* take = room + thread / 16 * kRoomRows + thread % 16 * 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to = leave + n * 8 * kRoomRows;
      to[0] = sum[n][0], to[kRoomRows] = sum[n][1];
      to[8] = sum[n][2], to[kRoomRows + 8] = sum[n][3];
    }
    asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float4 v = *reinterpret_cast<const float4*>(take + n * 8 * kRoomRows);
      v = make_float4(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale),
                      __fmul_rn(v.w, scale));
      if (add) {
        const float4& b = before[n];
        v = make_float4(__fadd_rn(b.x, v.x), __fadd_rn(b.y, v.y), __fadd_rn(b.z, v.z),
                        __fadd_rn(b.w, v.w));
      }
      if (n * 8 < left) *reinterpret_cast<float4*>(at(n)) = v;
    }
    out = at(kTiles);
    left -= kTiles * 8;
  }
};

// The same for SwiGLU: one warpgroup has gate's sums, the other up's, and they exchange halves of
// the tokens.
template <int NT>
struct GatedEnd {
  static constexpr int kParts = NT / 2 / kRound, kTiles = kRound;
  uint8_t* to = nullptr;
  int left;  // token tiles
  float bias[2], scale;

  __device__ __forceinline__ bool hold(const Activations& act, const ProductArgs& p,
                                       const ProductTile& tile) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int64_t row_tile = tile.unit + thread / 32;
    const int64_t first = tile.token_tile + threadIdx.x / 128 * (NT / 2);
    const int64_t at = row_tile / 4 * act.core_tiles + first;
    to = act.data + (at * 4 + row_tile % 4) * 256 + thread % 32 * 4;
    const int64_t row = row_tile * 16 + thread % 32 / 4;
    left = static_cast<int>(min(act.core_tiles - first, int64_t{NT}));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is = p.bias != nullptr && row + r * 8 < p.weight.rows;
      bias[r] = is ? p.bias[row + r * 8] : -0.0f;  // -0.0f: the identity of addition
    }
    scale = p.scale;
    return true;
  }
  __device__ __forceinline__ void ask() {}
  __device__ __forceinline__ void put(const float (&sum)[NT][4], int part, uint8_t* shared) {
    const bool up = threadIdx.x >= 128;
    float4* room =
        reinterpret_cast<float4*>(shared + part % 2 * kExchangeBytes<kRound>) + threadIdx.x % 128;
    float4* give = room + (up ? kRound * 128 : 0);
    const float4* take = room + (up ? 0 : kRound * 128);
    const auto ended = [&](bool second, int j, float(&v)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float s = second ? sum[NT / 2 + j][i] : sum[j][i];
        v[i] = __fmul_rn(__fadd_rn(s, bias[i / 2]), scale);
      }
    };
#pragma unroll
    for (int j = 0; j < kRound; ++j) {
      float v[4];
      ended(!up, j, v);
      give[j * 128] = make_float4(v[0], v[1], v[2], v[3]);
    }
    sync_pair();
#pragma unroll
    for (int j = 0; j < kRound; ++j) {
      const float4 v = take[j * 128];
      const float other[4] = {v.x, v.y, v.z, v.w};
      float mine[4], g[4], u[4];
      ended(up, j, mine);
#pragma unroll
      for (int i = 0; i < 4; ++i) g[i] = up ? other[i] : mine[i], u[i] = up ? mine[i] : other[i];
      put_gated(to + j * kTokenTileBytes, g, u, j < left);
    }
    to += kRound * kTokenTileBytes;
    left -= kRound;
  }
};

// Producer thread.
template <class S, int NT>
__device__ __forceinline__ void produce(GemmStages<S> ring, const ProductList& list, int64_t tokens,
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

template <class S, int NT>
using EndOf = std::conditional_t<kIsGate<S>, GatedEnd<NT>, PlainEnd<NT>>;

// The epilogue of a tile that PlainEnd does not support.
template <int NT>
__device__ __forceinline__ void finish_any(const ProductList& list, int64_t tokens, int index,
                                           const float (&sum)[NT][4]) {
  constexpr int kAtOnce = NT % 6 == 0 ? 6 : 8;
  const ProductTile tile = find_product_tile<NT, kRowTiles>(list, tokens, index);
  finish<NT, kAtOnce>(work_of(list.of[tile.product], tokens), sum, tile.unit + threadIdx.x / 32,
                      tile.token_tile, static_cast<int>(threadIdx.x % 32));
}

// Two warpgroups: every tile's slices from left to right.
template <class S, int NT>
__device__ __forceinline__ void walk(GemmStages<S> ring, const ProductList& list, int64_t tokens,
                                     int tiles, const Activations& act) {
  const int64_t cols = list.of[0].weight.cols;  // all weights have the same K, and the same tokens
  const int parts = leaves(cols), count = leaf_of(cols, 0).count;
  uint8_t* room = ring.stages + S::kRoom;
  float sum[NT][4] = {}, total[NT][4] = {};
  using End = EndOf<S, NT>;
  Reader<S> reader(ring);
  End held;
  bool holds = false;
  auto index = static_cast<int>(blockIdx.x);
  // Writes one part of the held sums; the next tile's sums take its place.
  const auto put = [&](int part) {
    held.put(total, part, room);
#pragma unroll
    for (int j = 0; j + End::kTiles < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = total[j + End::kTiles][i];
    }
  };
#pragma unroll 1
  for (; index < tiles; index += static_cast<int>(gridDim.x)) {
    reader.add(sum, true);
    int n = 1;
    if (holds) {
      int part = 0;
#pragma unroll 1
      for (; n < count && part < End::kParts; ++n, ++part) {
        held.ask();
        reader.add(sum, false);
        put(part);
      }
#pragma unroll 1
      for (; part < End::kParts; ++part) {
        held.ask();
        put(part);
      }
    }
#pragma unroll 1
    for (; n < count; ++n) reader.add(sum, false);
    const ProductTile tile = find_product_tile<NT, kTileUnits<S>>(list, tokens, index);
    if constexpr (kIsGate<S>) {
      holds = held.hold(act, list.of[threadIdx.x / 128], tile);
    } else {
      holds = held.hold(list.of[tile.product], tile, tokens);
    }
    reader.end();
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = sum[j][i];
    }
#pragma unroll 1
    for (int leaf = 1; leaf < parts; ++leaf) {
      const int its = leaf_of(cols, leaf).count;
#pragma unroll 1
      for (n = 0; n < its; ++n) reader.add(sum, n == 0);
      reader.end();
      add_sums(total, sum);
    }
    if constexpr (!kIsGate<S>) {
      if (!holds) finish_any(list, tokens, index, total);
    }
  }
  if (!holds) return;
#pragma unroll 1
  for (int part = 0; part < End::kParts; ++part) {
    held.ask();
    put(part);
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
  const GemmStages<S> ring = start_ring<S>(stages, full, empty, kConsumers / 32);
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
int launch_walk(const Context& ctx, const ProductList& list, int64_t tokens,
                const Activations& act) {
  using S = Stage<NT>;
  const auto kernel = walk_kernel<S, NT>;
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, NT * 8));
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  const auto blocks =
      static_cast<unsigned>(tiles < ctx.multiprocessors ? tiles : ctx.multiprocessors);
  return launch(ctx, kernel, dim3(blocks), dim3(kWalkThreads), S::kBytes, list, tokens, tiles, act);
}

// Wide tiles are faster if they balance the SMs as well.
template <template <int> class Stage>
int launch_walk(const Context& ctx, const ProductList& list, int64_t tokens,
                const Activations& act) {
  const auto cost = [&](int64_t tiles) {
    const int64_t all = list.first_block[list.count] * ceil_div(tokens, tiles * 8);
    return ceil_div(all, ctx.multiprocessors) * tiles;
  };
  return cost(kWide) * 9 <= cost(kNarrow) * 10
             ? launch_walk<Stage, kWide>(ctx, list, tokens, act)
             : launch_walk<Stage, kNarrow>(ctx, list, tokens, act);
}

}  // namespace

int run_wgmma_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                    const Activations& act) {
  ProductList list = with_blocks(gate_and_up, 16 * kRowTiles / 2);
  list.count = 1;  // up has the same rows, and isn't counted
  return launch_walk<GatedWalk>(ctx, list, tokens, act);
}

int run_wgmma(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_walk<Walk>(ctx, with_blocks(list, 16 * kRowTiles), tokens, {});
}

}  // namespace freshet::cuda

// Products of BF16 weights with many tokens on Hopper: wgmma, weights on its 64-row side.
//
// A block takes 128 rows, of a gated unit 64 of gate and 64 of up, and 192 tokens, or 128 where
// that fills the multiprocessors better. One thread keeps a ring of stages filled by the bulk copy
// engine, 64 columns of weights and of tokens each, a copy apiece: with copies of 1 or 2 KiB, or
// with copies that go to several blocks, the engine is far slower than the tensor cores. Two
// warpgroups multiply. Blocks stay and walk through tiles of the product, all leaves of K from left
// to right with a second set of sums. Where that makes too few tiles, two blocks share 64 rows: a
// warpgroup takes a quarter of the leaves, and the two add them up through each other's shared
// memory, from left to right too. (Larger clusters don't find room on all multiprocessors.) The
// bits are those of products.cu.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products_gated.cuh"
#include "backend/cuda/products_wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRowTiles = kPanelTiles<BF16>;  // of 16 rows

// NT: tiles of 8 tokens; Rows: bytes of weights of a stage.
template <int NT, int Rows>
struct Shape {
  static constexpr int kRowBytes = Rows, kGroupRows = Rows / 2, kGroupTokens = 0;
  static constexpr int kStageBytes = Rows + NT * kTokenBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes;
};
template <int NT>
using Walk = Shape<NT, kPanelBytes>;
template <int NT>
using Pair = Shape<NT, kPanelBytes / 2>;
// Registers change hands between whole warpgroups only.
constexpr int kWalkThreads = kConsumers + 128, kPairThreads = kConsumers + 32;
constexpr int kNarrow = 16, kWide = 24;  // tiles of tokens of a block that walks
constexpr int kRound = 4;                // tiles of tokens that a gated unit exchanges at once
template <int NT>
struct Gate : Walk<NT> {
  static constexpr int kStages = (kRingBytes - kExchangeBytes<kRound>) / Walk<NT>::kStageBytes;
  static constexpr int kRoom = kStages * Walk<NT>::kStageBytes;
  static constexpr int kBytes = kRoom + kExchangeBytes<kRound>;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Leaves one after the other.
__device__ __forceinline__ Leaf leaves_of(int64_t cols, int first, int count) {
  const Leaf last = leaf_of(cols, first + count - 1);
  const int begin = leaf_of(cols, first).first;
  return {begin, last.first + last.count - begin};
}

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

// One thread.
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
           token_bytes<NT>(tile, tokens), static_cast<int>((cols + 63) / 64), waited,
           [](int n) { return static_cast<int64_t>(n); });
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
      constexpr int kAtOnce = NT % 6 == 0 ? 6 : 8;
      finish<NT, kAtOnce>(work_of(p, tokens), total, tile.unit + warp, tile.token_tile,
                          static_cast<int>(threadIdx.x % 32));
    }
  }
}

// What a block of a pair takes of K: a warpgroup's pieces come by turns, then what is left of the
// longer ones.
struct Turns {
  Leaf of[2];
  int leaves;  // of a warpgroup
  __device__ __forceinline__ int both() const { return 2 * min(of[0].count, of[1].count); }
  __device__ __forceinline__ int64_t unit(int n) const {
    const bool second = n < both() ? n % 2 != 0 : of[1].count > of[0].count;
    return (second ? of[1].first : of[0].first) + (n < both() ? n / 2 : n - both() / 2);
  }
  // Where a warpgroup's k-th piece comes.
  __device__ __forceinline__ int place(int group, int k) const {
    return 2 * k < both() ? 2 * k + group : both() / 2 + k;
  }
};

// A warpgroup's sums of its leaves.
template <int NT>
__device__ __forceinline__ void sum_turns(const Ring<Pair<NT>>& ring, float (&sum)[2][NT][4],
                                          const Turns& turns, int64_t cols, int first_leaf) {
  using S = Pair<NT>;
  const int group = static_cast<int>(threadIdx.x / 128);
  int k = 0;
#pragma unroll
  for (int l = 0; l < 2; ++l) {
    if (l >= turns.leaves) break;
    const int count = leaf_of(cols, first_leaf + l).count;
    int before = -1;
    const auto leave = [&] {
      if (before >= 0 && threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[before]);
    };
    for (int n = 0; n < count; ++n, ++k) {
      const int at = turns.place(group, k), stage = at % S::kStages;
      const uint8_t* data = ring.stages + stage * S::kStageBytes;
      barrier_wait(&ring.full[stage], at / S::kStages & 1);
      add_piece<NT>(sum[l], data, data + S::kRowBytes, n == 0);
      wgmma_wait<1>();
      leave();
      before = stage;
    }
    wgmma_wait<0>();
    leave();
  }
}

// Both blocks leave their sums, and add the leaves' from left to right: a warp has 16 rows of 8
// tokens at a time.
template <int NT>
__device__ __forceinline__ void add_pair(const Work& w, const float (&sum)[2][NT][4],
                                         float4* shared, int mine, int64_t row_tile,
                                         int64_t token_tile) {
  const int thread = static_cast<int>(threadIdx.x), rank = static_cast<int>(blockIdx.z);
  if (thread < kConsumers) {
#pragma unroll
    for (int l = 0; l < 2; ++l) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const float(&v)[4] = sum[l][j];
        float4* to = shared + ((thread / 128 * mine + l) * NT + j) * 128 + thread % 128;
        if (l < mine) *to = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
  cluster_sync();
  if (thread < kConsumers) {
    for (int n = rank + thread / 32 * 2; n < NT * 4; n += kConsumers / 32 * 2) {
      float all[1][4];
      for (int leaf = 0; leaf < mine * 4; ++leaf) {
        const float4* from =
            shared + (leaf % (mine * 2) * NT + n / 4) * 128 + n % 4 * 32 + thread % 32;
        const float4 v = from_block(from, leaf / (mine * 2));
        const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          all[0][i] = leaf == 0 ? part[i] : __fadd_rn(all[0][i], part[i]);
        }
      }
      finish<1>(w, all, row_tile + n % 4, token_tile + n / 4, thread % 32);
    }
  }
  __syncwarp();
  cluster_sync();  // nobody leaves while the other reads here
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
    if (threadIdx.x == kConsumers) produce<S, NT>(ring, list, tokens, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    wait();
    walk<S, NT>(ring, list, tokens, tiles, act);
  }
#endif
}

// Blocks: [halves of tiles, 1, 2].
template <int NT>
__global__ void __launch_bounds__(kPairThreads, 1)
    pair_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Pair<NT>;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  let_next_start();
  Ring<S> ring = start_ring<S>(stages, full, empty, kConsumers / 64);
  const int half = static_cast<int>(blockIdx.x % 2), rank = static_cast<int>(blockIdx.z);
  const ProductTile tile =
      find_product_tile<NT, kRowTiles>(list, tokens, static_cast<int>(blockIdx.x / 2));
  const ProductArgs& p = list.of[tile.product];
  const int64_t cols = p.weight.cols, row_tile = tile.unit + half * (kRowTiles / 2);
  const int mine = leaves(cols) / 4, first_leaf = rank * 2 * mine;
  const Turns turns{{leaves_of(cols, first_leaf, mine), leaves_of(cols, first_leaf + mine, mine)},
                    mine};
  float sum[2][NT][4];
  if (threadIdx.x == kConsumers) {
    bool waited = false;
    fill(ring, OneRun<S::kRowBytes>{p.weight.data + tile_at<BF16>(row_tile, cols)},
         p.act + tile.token_tile * kTokenBytes, (tokens + 7) / 8 * kTokenBytes,
         token_bytes<NT>(tile, tokens), turns.of[0].count + turns.of[1].count, waited,
         [&](int n) { return turns.unit(n); });
  } else if (threadIdx.x < kConsumers) {
    wait();
    const int group = static_cast<int>(threadIdx.x / 128);
    sum_turns<NT>(ring, sum, turns, cols, first_leaf + group * mine);
  }
  __syncwarp();
  __syncthreads();  // the stages become the place of sums
  add_pair<NT>(work_of(p, tokens), sum, reinterpret_cast<float4*>(stages), mine, row_tile,
               tile.token_tile);
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

// Two blocks share 64 rows.
template <int NT>
int launch_pair(const ProductList& list, int64_t tokens) {
  if (const int error = raise_shared(pair_kernel<NT>, Pair<NT>::kBytes); error != 0) return error;
  const auto blocks = static_cast<unsigned>(list.first_block[list.count]) * 2;
  return launch_cluster(pair_kernel<NT>, dim3(blocks, 1, 2), dim3(kPairThreads), Pair<NT>::kBytes,
                        dim3(1, 1, 2), list, tokens);
}

}  // namespace

bool wgmma_takes(Code code, int64_t tokens) {
  constexpr int64_t kFew = 32;
  return code == Code::kBF16 && capability == 90 && tokens > kFew;
}

int run_wgmma_gated(const ProductList& gate_and_up, int64_t tokens, const Activations& act) {
  if (tokens <= 64) return run_share_gated(gate_and_up, tokens, act);
  ProductList list = with_blocks(gate_and_up, 16 * kRowTiles / 2);
  list.count = 1;  // the other one's rows stand beside it
  return launch_walk<Gate>(list, tokens, act);
}

int run_wgmma(const ProductList& given, int64_t tokens) {
  const ProductList list = with_blocks(given, 16 * kRowTiles);
  // All have as many columns.
  const bool narrow =
      leaves(list.of[0].weight.cols) >= 4 && list.first_block[list.count] * 4 <= multiprocessors;
  if (narrow && tokens <= 64) return launch_pair<8>(list, tokens);
  if (narrow && tokens <= 128) return launch_pair<16>(list, tokens);
  return share_takes(given, tokens) ? run_share(given, tokens)
                                    : launch_walk<Walk>(list, tokens, {});
}

}  // namespace freshet::cuda

// Products of BF16 weights with many tokens on Hopper: wgmma, weights on its 64-row side.
//
// A block takes 128 rows. One thread keeps a ring of stages filled by the bulk copy engine, 64
// columns of weights and of tokens each, a copy apiece: with copies of 1 or 2 KiB, or with copies
// that go to several blocks, the engine is far slower than the tensor cores. Two warpgroups
// multiply. Blocks stay and walk through tiles of the product, all leaves of K from left to right
// with a second set of sums. Where that makes too few tiles, two blocks share 64 rows: a warpgroup
// takes a quarter of the leaves, and the two add them up through each other's shared memory, from
// left to right too. (Larger clusters don't find room on all multiprocessors.) The bits are those
// of products.cu.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products.cuh"
#include "backend/cuda/wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRowTiles = kPanelTiles<BF16>;  // of 16 rows
constexpr int kConsumers = 256;
constexpr int kRowBytes = static_cast<int>(kUnitStep<BF16>);  // of a stage
constexpr int kTokenBytes = kTokenTile * 64 * 2;              // a tile's

constexpr int kRingBytes = 216 << 10;  // or less

// NT: tiles of 8 tokens; Rows: bytes of weights of a stage.
template <int NT, int Rows>
struct Shape {
  static constexpr int kStageBytes = Rows + NT * kTokenBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kBytes = kStages * kStageBytes;
};
template <int NT>
using Walk = Shape<NT, kRowBytes>;
template <int NT>
using Pair = Shape<NT, kRowBytes / 2>;
// Registers change hands between whole warpgroups only.
constexpr int kWalkThreads = kConsumers + 128, kPairThreads = kConsumers + 32;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Pieces of 64 columns of a leaf.
struct Leaf {
  int first, count;
};
__device__ __forceinline__ Leaf leaf_of(int64_t cols, int leaf) {
  const int units = static_cast<int>((cols + 63) / 64), parts = leaves(cols);
  const int first = units * leaf / parts;
  return {first, units * (leaf + 1) / parts - first};
}

// Leaves one after the other.
__device__ __forceinline__ Leaf leaves_of(int64_t cols, int first, int count) {
  const Leaf last = leaf_of(cols, first + count - 1);
  const int begin = leaf_of(cols, first).first;
  return {begin, last.first + last.count - begin};
}

template <class S>
struct Ring {
  uint8_t* stages;
  uint64_t *full, *empty;
  int at = 0;  // pieces taken or given so far
  __device__ __forceinline__ int stage() const { return at % S::kStages; }
  __device__ __forceinline__ int round() const { return at / S::kStages & 1; }
  __device__ __forceinline__ uint8_t* data() const { return stages + stage() * S::kStageBytes; }
};

// Fills the ring with `count` pieces, the n-th for columns 64 unit(n) on. Weights are asked for
// before the kernel in front of this one has ended, tokens after.
template <class S, int Rows, class Unit>
__device__ __forceinline__ void fill(Ring<S>& ring, const uint8_t* rows, const uint8_t* tokens,
                                     int64_t token_step, uint32_t bytes, int count, bool& waited,
                                     const Unit& unit) {
  const auto copy_rows = [&](int n, int stage) {
    barrier_expect(&ring.full[stage], Rows + bytes);
    bulk_copy(ring.stages + stage * S::kStageBytes, rows + unit(n) * kUnitStep<BF16>, Rows,
              &ring.full[stage]);
  };
  const auto copy_tokens = [&](int n, int stage) {
    bulk_copy(ring.stages + stage * S::kStageBytes + Rows, tokens + unit(n) * token_step, bytes,
              &ring.full[stage]);
  };
  int n = 0;
  if (!waited) {
    for (; n < min(count, S::kStages); ++n) copy_rows(n, n);
    wait();
    for (int k = 0; k < n; ++k) copy_tokens(k, k);
    waited = true;
  }
  for (; n < count; ++n) {
    const int at = ring.at + n, stage = at % S::kStages;
    if (at >= S::kStages) barrier_wait(&ring.empty[stage], (at / S::kStages - 1) & 1);
    copy_rows(n, stage);
    copy_tokens(n, stage);
  }
  ring.at += count;
}

template <int NT>
__device__ __forceinline__ uint32_t token_bytes(const ProductTile& tile, int64_t tokens) {
  const int left = static_cast<int>((tokens + 7) / 8 - tile.token_tile);
  return static_cast<uint32_t>(min(NT, left) * kTokenBytes);
}

// One thread.
template <int NT>
__device__ __forceinline__ void produce(Ring<Walk<NT>> ring, const ProductList& list,
                                        int64_t tokens, int tiles) {
  const int64_t token_step = (tokens + 7) / 8 * kTokenBytes;
  bool waited = false;
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const ProductTile tile = find_product_tile<NT, kRowTiles>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int64_t cols = p.weight.cols;
    fill<Walk<NT>, kRowBytes>(ring, p.weight.data + tile_at<BF16>(tile.unit, cols),
                              p.act + tile.token_tile * kTokenBytes, token_step,
                              token_bytes<NT>(tile, tokens), static_cast<int>((cols + 63) / 64),
                              waited, [](int n) { return static_cast<int64_t>(n); });
  }
}

// sum += a piece, for a warpgroup's 64 rows.
template <int NT>
__device__ __forceinline__ void add_piece(float (&sum)[NT][4], const uint8_t* rows,
                                          const uint8_t* tokens, bool first) {
  const uint64_t a = operand_at(rows), b = operand_at(tokens);
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma(sum, a + k * kNextStep, b + k * kNextStep, !first || k > 0);
  wgmma_commit();
}

// sum = the next `count` pieces, for a warpgroup's 64 rows.
template <int NT>
__device__ __forceinline__ void sum_pieces(Ring<Walk<NT>>& ring, float (&sum)[NT][4], int count) {
  const int group = static_cast<int>(threadIdx.x / 128);
  const auto leave = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[stage]);
  };
  int before = -1;
  for (int n = 0; n < count; ++n, ++ring.at) {
    barrier_wait(&ring.full[ring.stage()], ring.round());
    add_piece<NT>(sum, ring.data() + group * (kRowBytes / 2), ring.data() + kRowBytes, n == 0);
    wgmma_wait<1>();
    if (before >= 0) leave(before);
    before = ring.stage();
  }
  wgmma_wait<0>();
  if (before >= 0) leave(before);
}

__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
}

// Two warpgroups: every tile's leaves from left to right.
template <int NT>
__device__ __forceinline__ void walk(Ring<Walk<NT>> ring, const ProductList& list, int64_t tokens,
                                     int tiles) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const ProductTile tile = find_product_tile<NT, kRowTiles>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int parts = leaves(p.weight.cols);
    float total[NT][4], sum[NT][4];
    for (int leaf = 0; leaf < parts; ++leaf) {
      sum_pieces<NT>(ring, sum, leaf_of(p.weight.cols, leaf).count);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[j][i] = leaf == 0 ? sum[j][i] : __fadd_rn(total[j][i], sum[j][i]);
        }
      }
    }
    finish<NT>(work_of(p, tokens), total, tile.unit + warp, tile.token_tile, lane);
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
      add_piece<NT>(sum[l], data, data + kRowBytes / 2, n == 0);
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

template <class S>
__device__ __forceinline__ Ring<S> start_ring(uint8_t* stages, uint64_t* full, uint64_t* empty,
                                              int readers) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], readers);
    }
    barriers_ready();
  }
  __syncthreads();
  return {stages, full, empty};
}
#endif

template <int NT>
__global__ void __launch_bounds__(kWalkThreads, 1)
    walk_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Walk<NT>;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  let_next_start();
  const Ring<S> ring = start_ring<S>(stages, full, empty, kConsumers / 32);
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (threadIdx.x == kConsumers) produce<NT>(ring, list, tokens, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    wait();
    walk<NT>(ring, list, tokens, tiles);
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
    fill<S, kRowBytes / 2>(ring, p.weight.data + tile_at<BF16>(row_tile, cols),
                           p.act + tile.token_tile * kTokenBytes, (tokens + 7) / 8 * kTokenBytes,
                           token_bytes<NT>(tile, tokens), turns.of[0].count + turns.of[1].count,
                           waited, [&](int n) { return turns.unit(n); });
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

template <int NT>
int launch_wgmma(const ProductList& list, int64_t tokens) {
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, NT * 8));
  const auto raise = [](auto kernel, int bytes) {
    return static_cast<int>(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  };
  // All have as many columns.
  if (leaves(list.of[0].weight.cols) >= 4 && tiles * 4 <= multiprocessors) {
    if (const int error = raise(pair_kernel<NT>, Pair<NT>::kBytes); error != 0) return error;
    return launch_cluster(pair_kernel<NT>, dim3(static_cast<unsigned>(tiles) * 2, 1, 2),
                          dim3(kPairThreads), Pair<NT>::kBytes, dim3(1, 1, 2), list, tokens);
  }
  if (const int error = raise(walk_kernel<NT>, Walk<NT>::kBytes); error != 0) return error;
  const auto blocks = static_cast<unsigned>(tiles < multiprocessors ? tiles : multiprocessors);
  return launch(walk_kernel<NT>, dim3(blocks), dim3(kWalkThreads), Walk<NT>::kBytes, list, tokens,
                tiles);
}

}  // namespace

bool wgmma_takes(Code code, int64_t tokens) {
  constexpr int64_t kFew = 32;
  return code == Code::kBF16 && capability == 90 && tokens > kFew;
}

int run_wgmma(const ProductList& given, int64_t tokens) {
  const ProductList list = with_blocks(given, 16 * kRowTiles);
  return tokens <= 64 ? launch_wgmma<8>(list, tokens) : launch_wgmma<16>(list, tokens);
}

}  // namespace freshet::cuda

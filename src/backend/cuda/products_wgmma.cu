// Products of BF16 weights with many tokens on Hopper: wgmma, weights on its 64-row side.
//
// A block takes 128 rows. One thread keeps a ring of stages filled by the bulk copy engine, 64
// columns of weights and of tokens each, a copy apiece: with copies of 1 or 2 KiB, or with copies
// that go to several blocks, the engine is far slower than the tensor cores. Two warpgroups
// multiply. Either blocks stay and walk through tiles of the product, all leaves of K from left to
// right with a second set of sums; or, where that makes too few tiles, the blocks of a cluster take
// a leaf each and add up through each other's shared memory, from left to right too. The bits are
// those of products.cu.
#include "backend/cuda/cluster.cuh"
#include "backend/cuda/products.cuh"
#include "backend/cuda/wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRowTiles = kPanelTiles<BF16>;  // of 16 rows
constexpr int kConsumers = 256;
constexpr int kRowBytes = static_cast<int>(kUnitStep<BF16>);  // of a stage
constexpr int kTokenBytes = kTokenTile * 64 * 2;              // a tile's

// NT: tiles of 8 tokens; kSplit: a block takes one leaf, and two blocks share a multiprocessor.
template <int NT, bool kSplit>
struct Shape {
  static constexpr int kStageBytes = kRowBytes + NT * kTokenBytes;
  static constexpr int kStages = static_cast<int>((kSplit ? 108 << 10 : 216 << 10) / kStageBytes);
  static constexpr int kBytes = kStages * kStageBytes;
  // Registers change hands between whole warpgroups only.
  static constexpr int kThreads = kConsumers + (kSplit ? 32 : 128);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A tile of the product.
struct Tile {
  int product;
  int64_t row_tile, token_tile;
};

template <int NT>
__device__ __forceinline__ Tile find_tile(const ProductList& list, int64_t tokens, int index) {
  constexpr int kRowsAtOnce = 16;  // blocks of rows that walk through the tokens together
  const int rows = list.first_block[list.count];
  const int columns = static_cast<int>((tokens + NT * 8 - 1) / (NT * 8));
  const int group = index / (kRowsAtOnce * columns), in = index % (kRowsAtOnce * columns);
  const int together = min(kRowsAtOnce, rows - group * kRowsAtOnce);
  const int block = group * kRowsAtOnce + in % together;
  int product = 0;
  while (product + 1 < list.count && block >= list.first_block[product + 1]) ++product;
  return {product, static_cast<int64_t>(block - list.first_block[product]) * kRowTiles,
          static_cast<int64_t>(in / together) * NT};
}

// Pieces of 64 columns of a leaf.
struct Leaf {
  int first, count;
};
__device__ __forceinline__ Leaf leaf_of(int64_t cols, int leaf) {
  const int units = static_cast<int>((cols + 63) / 64), parts = leaves(cols);
  const int first = units * leaf / parts;
  return {first, units * (leaf + 1) / parts - first};
}

template <int NT, bool kSplit>
struct Ring {
  using S = Shape<NT, kSplit>;
  uint8_t* stages;
  uint64_t *full, *empty;
  int at = 0;  // pieces taken or given so far
  __device__ __forceinline__ int stage() const { return at % S::kStages; }
  __device__ __forceinline__ int round() const { return at / S::kStages & 1; }
  __device__ __forceinline__ uint8_t* data() const { return stages + stage() * S::kStageBytes; }
};

// One thread. Weights are asked for before the kernel in front of this one has ended, tokens after.
template <int NT, bool kSplit>
__device__ __forceinline__ void produce(Ring<NT, kSplit> ring, const ProductList& list,
                                        int64_t tokens, int tiles, int leaf) {
  using S = Shape<NT, kSplit>;
  const int act_tiles = static_cast<int>((tokens + 7) / 8);
  bool waited = false;
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const Tile tile = find_tile<NT>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int64_t cols = p.weight.cols;
    const Leaf part = kSplit ? leaf_of(cols, leaf) : Leaf{0, static_cast<int>((cols + 63) / 64)};
    const int token_tile = static_cast<int>(tile.token_tile);
    const auto bytes = static_cast<uint32_t>(min(NT, act_tiles - token_tile) * kTokenBytes);
    const uint8_t* rows =
        p.weight.data + tile_at<BF16>(tile.row_tile, cols) + part.first * kUnitStep<BF16>;
    const uint8_t* columns =
        p.act + (static_cast<int64_t>(part.first) * act_tiles + token_tile) * kTokenBytes;
    const auto copy_rows = [&](int n, int stage) {
      barrier_expect(&ring.full[stage], kRowBytes + bytes);
      bulk_copy(ring.stages + stage * S::kStageBytes, rows + n * kUnitStep<BF16>, kRowBytes,
                &ring.full[stage]);
    };
    const auto copy_tokens = [&](int n, int stage) {
      bulk_copy(ring.stages + stage * S::kStageBytes + kRowBytes,
                columns + static_cast<int64_t>(n) * act_tiles * kTokenBytes, bytes,
                &ring.full[stage]);
    };
    int n = 0;
    if (!waited) {
      for (; n < min(part.count, S::kStages); ++n) copy_rows(n, n);
      wait();
      for (int k = 0; k < n; ++k) copy_tokens(k, k);
      waited = true;
    }
    for (; n < part.count; ++n) {
      const int at = ring.at + n, stage = at % S::kStages;
      if (at >= S::kStages) barrier_wait(&ring.empty[stage], (at / S::kStages - 1) & 1);
      copy_rows(n, stage);
      copy_tokens(n, stage);
    }
    ring.at += part.count;
  }
}

// sum = the next `count` pieces, for a warpgroup's 64 rows.
template <int NT, bool kSplit>
__device__ __forceinline__ void sum_pieces(Ring<NT, kSplit>& ring, float (&sum)[NT][4], int count) {
  const int group = static_cast<int>(threadIdx.x / 128);
  const auto leave = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&ring.empty[stage]);
  };
  int before = -1;
  for (int n = 0; n < count; ++n, ++ring.at) {
    barrier_wait(&ring.full[ring.stage()], ring.round());
    const uint64_t a = operand_at(ring.data() + group * (kRowBytes / 2));
    const uint64_t b = operand_at(ring.data() + kRowBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(sum, a + k * kNextStep, b + k * kNextStep, n + k > 0);
    wgmma_commit();
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
__device__ __forceinline__ void walk(Ring<NT, false> ring, const ProductList& list, int64_t tokens,
                                     int tiles) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int index = static_cast<int>(blockIdx.x); index < tiles;
       index += static_cast<int>(gridDim.x)) {
    const Tile tile = find_tile<NT>(list, tokens, index);
    const ProductArgs& p = list.of[tile.product];
    const int parts = leaves(p.weight.cols);
    float total[NT][4], sum[NT][4];
    for (int leaf = 0; leaf < parts; ++leaf) {
      sum_pieces<NT, false>(ring, sum, leaf_of(p.weight.cols, leaf).count);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[j][i] = leaf == 0 ? sum[j][i] : __fadd_rn(total[j][i], sum[j][i]);
        }
      }
    }
    finish<NT>(work_of(p, tokens), total, tile.row_tile + warp, tile.token_tile, lane);
  }
}

// Two warpgroups leave this block's sums, and add the leaves' from left to right.
template <int NT>
__device__ __forceinline__ void add_leaves(const Work& w, const float (&sum)[NT][4], float* shared,
                                           int leaf, const Tile& tile) {
  const int thread = static_cast<int>(threadIdx.x), parts = leaves(w.cols);
  if (thread < kConsumers) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) shared[(j * 4 + i) * kConsumers + thread] = sum[j][i];
    }
  }
  cluster_sync();
  if (thread < kConsumers) {
    for (int j = leaf; j < NT; j += parts) {
      float all[1][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* p = shared + (j * 4 + i) * kConsumers + thread;
        all[0][i] = from_block(p, 0);
        for (int l = 1; l < parts; ++l) all[0][i] = __fadd_rn(all[0][i], from_block(p, l));
      }
      finish<1>(w, all, tile.row_tile + thread / 32, tile.token_tile + j, thread % 32);
    }
  }
  cluster_sync();  // nobody leaves while others read here
}
#endif

// Blocks: [as many as stay], or [tiles, 1, leaves] if kSplit.
template <int NT, bool kSplit>
__global__ void __launch_bounds__(Shape<NT, kSplit>::kThreads, kSplit ? 2 : 1)
    wgmma_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<NT, kSplit>;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  let_next_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::kStages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], kConsumers / 32);
    }
    barriers_ready();
  }
  __syncthreads();
  Ring<NT, kSplit> ring{stages, full, empty};
  const int leaf = static_cast<int>(blockIdx.z);
  if constexpr (kSplit) {
    const Tile tile = find_tile<NT>(list, tokens, static_cast<int>(blockIdx.x));
    const ProductArgs& p = list.of[tile.product];
    float sum[NT][4];
    if (threadIdx.x == kConsumers) produce<NT, true>(ring, list, tokens, tiles, leaf);
    if (threadIdx.x < kConsumers) {
      wait();
      sum_pieces<NT, true>(ring, sum, leaf_of(p.weight.cols, leaf).count);
    }
    __syncthreads();  // the stages become the place of sums
    add_leaves<NT>(work_of(p, tokens), sum, reinterpret_cast<float*>(stages), leaf, tile);
  } else if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (threadIdx.x == kConsumers) produce<NT, false>(ring, list, tokens, tiles, leaf);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    wait();
    walk<NT>(ring, list, tokens, tiles);
  }
#endif
}

template <int NT, bool kSplit>
int launch_wgmma(const ProductList& list, int64_t tokens, int parts) {
  using S = Shape<NT, kSplit>;
  const auto kernel = wgmma_kernel<NT, kSplit>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const auto tiles = static_cast<int>(list.first_block[list.count] * ceil_div(tokens, NT * 8));
  const auto leaf_blocks = static_cast<unsigned>(kSplit ? parts : 1);
  const int blocks = kSplit || tiles < multiprocessors ? tiles : multiprocessors;
  return launch_cluster(kernel, dim3(static_cast<unsigned>(blocks), 1, leaf_blocks),
                        dim3(S::kThreads), S::kBytes, dim3(1, 1, leaf_blocks), list, tokens, tiles);
}

}  // namespace

bool wgmma_takes(Code code, int64_t tokens) {
  constexpr int64_t kFew = 32;
  return code == Code::kBF16 && capability == 90 && tokens > kFew;
}

int run_wgmma(const ProductList& given, int64_t tokens) {
  constexpr int64_t kEnoughTiles = 40;  // more walk faster than eight times as many add up
  const ProductList list = with_blocks(given, 16 * kRowTiles);
  const int parts = leaves(list.of[0].weight.cols);  // all have as many columns
  const int64_t tiles = list.first_block[list.count] * ceil_div(tokens, 128);
  if (parts > 1 && tiles < kEnoughTiles) {
    return tokens <= 64 ? launch_wgmma<8, true>(list, tokens, parts)
                        : launch_wgmma<16, true>(list, tokens, parts);
  }
  return tokens <= 64 ? launch_wgmma<8, false>(list, tokens, parts)
                      : launch_wgmma<16, false>(list, tokens, parts);
}

}  // namespace freshet::cuda

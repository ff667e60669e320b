// GEMM for many tokens: a block computes 128 rows by 128 (or 32) tokens. It either loops over all
// split-K slices from left to right, with a second set of sums; or, if that makes too few blocks,
// the blocks of a cluster take one slice each and add sums through distributed shared memory, also
// from left to right. Bit-identical to gemm_sm80_small_m.cu.
//
// Eight warps are arranged 4 by 2. Each has two row tiles, whose operands it loads itself, one
// piece ahead, and eight token tiles, which pass through kStages shared-memory stages used by all
// warps.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/runtime/cluster.cuh"

namespace freshet::cuda {
namespace {

constexpr int kRowTiles = 8, kStages = 4;
constexpr int kMine = 2;  // row tiles per warp

template <int kMyTokens>  // token tiles per warp
constexpr int kStageBytesOf = 2 * kMyTokens * 1024;

// Adds the slices' sums, which are in the blocks' shared memory, and writes this block's share.
template <int kMyTokens>
__device__ __forceinline__ void add_leaves(const Work& w, const float (&sum)[kMine][kMyTokens][4],
                                           float* shared, int rank, int parts, int64_t first_row,
                                           int64_t first_token) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
#pragma unroll
    for (int j = 0; j < kMyTokens; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        shared[((m * kMyTokens + j) * 4 + k) * 256 + thread] = sum[m][j][k];
      }
    }
  }
  cluster_sync();
  for (int at = rank; at < kMine * kMyTokens; at += parts) {
    float all[1][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float* p = shared + (at * 4 + k) * 256 + thread;
      all[0][k] = from_block(p, 0);
      for (int l = 1; l < parts; ++l) all[0][k] = __fadd_rn(all[0][k], from_block(p, l));
    }
    finish<1>(w, all, first_row + at / kMyTokens, first_token + at % kMyTokens, thread % 32);
  }
  cluster_sync();  // a block must not exit while others read its memory
}

template <class F, int kMyTokens, bool kSplit>
__device__ __forceinline__ void tile_block(const ProductList& list, int64_t tokens) {
  extern __shared__ __align__(128) uint8_t stages[];
  constexpr int kPieces = F::kUnit / 64;
  constexpr int kTokenTiles = 2 * kMyTokens, kStageBytes = kStageBytesOf<kMyTokens>;
  let_next_start();
  int product = 0;
  while (product + 1 < list.count &&
         static_cast<int>(blockIdx.y) >= list.first_block[product + 1]) {
    ++product;
  }
  const ProductArgs& p = list.of[product];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t cols = p.weight.cols;
  const int64_t row_tiles = (p.weight.rows + 15) / 16, act_tiles = (tokens + 7) / 8;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.y) - list.first_block[product]) * kRowTiles + warp / 2 * kMine;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * kTokenTiles;
  const uint8_t* panels[kMine];
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int64_t tile = first_row + m < row_tiles ? first_row + m : row_tiles - 1;
    panels[m] = p.weight.data + tile_at<F>(tile, cols);
  }
  const auto load = [&](Piece(&piece)[kMine], int i) {
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      F::template load<FromMemory>(panels[m] + static_cast<int64_t>(i / kPieces) * kUnitStep<F>,
                                   i % kPieces, lane, piece[m]);
    }
  };
  const auto fetch = [&](int i) {
#pragma unroll
    for (int n = 0; n < kStageBytes / 16 / 256; ++n) {
      const int at = n * 256 + static_cast<int>(threadIdx.x);
      const int64_t tile =
          first_token + at / 64 < act_tiles ? first_token + at / 64 : act_tiles - 1;
      cp_async16(stages + i % kStages * kStageBytes + at * 16,
                 p.act + (i * act_tiles + tile) * 1024 + at % 64 * 16);
    }
  };

  const int units = static_cast<int>((cols + F::kUnit - 1) / F::kUnit);
  const int parts = leaves(cols);
  int leaf = kSplit ? static_cast<int>(blockIdx.z) : 0;
  const auto edge = [&](int of) {
    return static_cast<int>(static_cast<int64_t>(units) * of / parts) * kPieces;
  };
  const int first = edge(leaf), pieces = kSplit ? edge(leaf + 1) : units * kPieces;
  int end = edge(leaf + 1);
  Piece now[kMine], next[kMine];
  load(next, first);
  wait();
  for (int i = first; i < first + kStages - 1; ++i) {
    if (i < pieces) fetch(i);
    cp_async_commit();
  }
  float total[kSplit ? 1 : kMine][kSplit ? 1 : kMyTokens][4], sum[kMine][kMyTokens][4] = {};
  for (int i = first; i < pieces; ++i) {
#pragma unroll
    for (int m = 0; m < kMine; ++m) now[m] = next[m];
    if (i + 1 < pieces) load(next, i + 1);
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (i + kStages - 1 < pieces) fetch(i + kStages - 1);
    cp_async_commit();
    const auto* tile = reinterpret_cast<const uint4*>(stages + i % kStages * kStageBytes) +
                       warp % 2 * kMyTokens * 64 + lane;
    uint4 a[kMine][4];
#pragma unroll
    for (int m = 0; m < kMine; ++m) F::decode(now[m], i % kPieces, lane, a[m]);
#pragma unroll
    for (int j = 0; j < kMyTokens; ++j) {
      uint32_t low[4], high[4];
      ldmatrix4(low, tile + j * 64);
      ldmatrix4(high, tile + j * 64 + 32);
      const uint4 b[1][2] = {{make_uint4(low[0], low[1], low[2], low[3]),
                              make_uint4(high[0], high[1], high[2], high[3])}};
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
        float(&to)[1][4] = reinterpret_cast<float(&)[1][4]>(sum[m][j]);
        accumulate<F, 1>(to, a[m], b, now[m], i % kPieces);
      }
    }
    if constexpr (!kSplit) {
      if (i + 1 < end) continue;
#pragma unroll
      for (int m = 0; m < kMine; ++m) {
#pragma unroll
        for (int j = 0; j < kMyTokens; ++j) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            total[m][j][k] = leaf == 0 ? sum[m][j][k] : __fadd_rn(total[m][j][k], sum[m][j][k]);
            sum[m][j][k] = 0.0f;
          }
        }
      }
      end = edge(++leaf + 1);
    }
  }
  const Work w{p.weight.data, p.weight.rows, cols,   p.act,   p.act_chunks, act_tiles, p.out,
               p.out_stride,  tokens,        p.bias, p.scale, p.add != 0,   F::kUp};
  const int64_t my_row = first_row, my_token = first_token + warp % 2 * kMyTokens;
  if constexpr (kSplit) {
    cp_async_wait<0>();
    __syncthreads();  // the stages are reused for sums
    add_leaves<kMyTokens>(w, sum, reinterpret_cast<float*>(stages), leaf, parts, my_row, my_token);
  } else {
#pragma unroll
    for (int m = 0; m < kMine; ++m) finish<kMyTokens>(w, total[m], my_row + m, my_token, lane);
  }
}

// Blocks: [token tiles, tiles of 128 rows of all GEMMs, slices if kSplit].
template <class F, int kMyTokens, bool kSplit>
__global__ void __launch_bounds__(256, 1)
    tile_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
  if constexpr (kHasOnlyMma<F>) tile_block<F, kMyTokens, kSplit>(list, tokens);
}

template <class F, int kMyTokens, bool kSplit>
int launch_tiles(const Context& ctx, const ProductList& list, int64_t tokens, int parts) {
  constexpr int kBytes = kStages * kStageBytesOf<kMyTokens>;
  const auto kernel = tile_kernel<F, kMyTokens, kSplit>;
  if (const int error = raise_shared(kernel, kBytes); error != 0) return error;
  const auto leaf_blocks = static_cast<unsigned>(kSplit ? parts : 1);
  const dim3 grid(static_cast<unsigned>(ceil_div(tokens, 16 * kMyTokens)),
                  static_cast<unsigned>(list.first_block[list.count]), leaf_blocks);
  return launch_cluster(ctx, kernel, grid, dim3(256), kBytes, dim3(1, 1, leaf_blocks), list,
                        tokens);
}

}  // namespace

template <class F>
int run_tiles(const Context& ctx, const ProductList& given, int64_t tokens) {
  constexpr int64_t kEnoughBlocks = 64;  // with more, splitting K no longer pays
  const ProductList list = with_blocks(given, 16 * kRowTiles);
  const int parts = leaves(list.of[0].weight.cols);  // all weights have the same K
  const int64_t blocks = list.first_block[list.count] * ceil_div(tokens, 128);
  const bool split = ctx.capability >= 90 && parts > 1 && blocks < kEnoughBlocks;
  if (split) return launch_tiles<F, 8, true>(ctx, list, tokens, parts);
  return launch_tiles<F, 8, false>(ctx, list, tokens, parts);
}

template int run_tiles<F16>(const Context&, const ProductList&, int64_t);
template int run_tiles<BF16>(const Context&, const ProductList&, int64_t);
template int run_tiles<FP8>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q8_0>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q4_0>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q4_K>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q6_K>(const Context&, const ProductList&, int64_t);
template int run_tiles<MXFP4>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q4_1>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q5_0>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q5_1>(const Context&, const ProductList&, int64_t);
template int run_tiles<IQ4_NL>(const Context&, const ProductList&, int64_t);
template int run_tiles<IQ4_XS>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q2_K>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q3_K>(const Context&, const ProductList&, int64_t);
template int run_tiles<Q5_K>(const Context&, const ProductList&, int64_t);
template int run_tiles<Int4G128>(const Context&, const ProductList&, int64_t);
template int run_tiles<Int4G32>(const Context&, const ProductList&, int64_t);

}  // namespace freshet::cuda

// F32 GEMM: for few tokens one warp per row, for more tokens 4 rows by 4 tokens per warp, and for
// many tokens tiles in shared memory.
#include "backend/cuda/gemm/gemm_f32.cuh"

namespace freshet::cuda {
namespace {

__device__ __forceinline__ int product_of_block(const ProductList& list) {
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  return i;
}

template <bool kSquares, bool kAligned>
__global__ void __launch_bounds__(256)
    f32_few_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
  let_next_start();
  const int i = product_of_block(list);
  const int64_t at =
      static_cast<int64_t>(blockIdx.x - list.first_block[i]) * kWarps + threadIdx.x / 32;
  if constexpr (kSquares) {
    f32_square(list.of[i], at * kF32Side, static_cast<int64_t>(blockIdx.y) * kF32Side, tokens);
  } else {
    for (int64_t t = blockIdx.y; t < tokens; t += gridDim.y) f32_row<kAligned>(list.of[i], at, t);
  }
}

// Blocks of 32 rows by 32 tokens, warps 2 by 4 with 16 by 8 each; stages of 128 columns.
constexpr int kRowsOfWarp = 16, kTokensOfWarp = 8, kBlockSide = 32, kStages = 4;
constexpr int kStageFloats = 2 * kBlockSide * 128;

// f32_lanes() for 32 sums, of which lane l receives the l-th: each step halves the sums per lane.
template <int kStep = 16>
__device__ __forceinline__ float f32_lanes(float (&sum)[32]) {
  const bool upper = (threadIdx.x & kStep) != 0;
#pragma unroll
  for (int i = 0; i < kStep; ++i) {
    const float kept = upper ? sum[i + kStep] : sum[i];
    const float given = upper ? sum[i] : sum[i + kStep];
    sum[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffff, given, kStep));
  }
  if constexpr (kStep > 1) return f32_lanes<kStep / 2>(sum);
  return sum[0];
}

__global__ void __launch_bounds__(256, 1)
    f32_many_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
  extern __shared__ __align__(16) float stages[];
  let_next_start();
  wait();
  const int i = product_of_block(list), warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const ProductArgs& p = list.of[i];
  const int64_t cols = p.weight.cols, pieces = (cols + 127) / 128, rows = p.weight.rows;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * kBlockSide;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * kBlockSide;
  // A warp loads four adjacent rows, which are 64 floats apart, and as many tokens.
  constexpr int kBrings = kBlockSide / kWarps;
  const int at = warp * kBrings;
  const F32Row w_rows(p.weight, first_row + at < rows ? first_row + at : at % 16);
  const float* w_from = w_rows.data + lane / 16 * 1024 + lane % 16 * 4;
  const float* x_from = p.x + lane * 4;
  int64_t x_at[kBrings];
#pragma unroll
  for (int n = 0; n < kBrings; ++n) {
    x_at[n] = min(first_token + at + n, tokens - 1) * p.x_stride;
  }
  const auto fetch = [&](int64_t piece) {
    float* to = stages + piece % kStages * kStageFloats + at * 128 + lane * 4;
    const int64_t col = piece * 128 + lane * 4;
    const bool real_w = col < w_rows.padded, real_x = col < cols;
    const float* w = real_w ? w_from + piece * 2048 : w_from;
    const float* x = real_x ? x_from + piece * 128 : x_from;
#pragma unroll
    for (int n = 0; n < kBrings; ++n) {
      cp_async16(to + n * 128, w + n * 64, real_w);
      cp_async16(to + (kBlockSide + n) * 128, x + x_at[n], real_x);
    }
  };
  for (int n = 0; n < kStages - 1; ++n) {
    if (n < pieces) fetch(n);
    cp_async_commit();
  }
  const int row = warp % 2 * kRowsOfWarp, token = warp / 2 * kTokensOfWarp;
  float sum[kTokensOfWarp / 2][32] = {};  // 16 rows of two tokens
#pragma unroll 1
  for (int64_t piece = 0; piece < pieces; ++piece) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (piece + kStages - 1 < pieces) fetch(piece + kStages - 1);
    cp_async_commit();
    const float* stage = stages + piece % kStages * kStageFloats + lane * 4;
    float4 x[kTokensOfWarp];  // fewer tokens than rows, so that the first FMAs wait less
#pragma unroll
    for (int t = 0; t < kTokensOfWarp; ++t) {
      x[t] = *reinterpret_cast<const float4*>(stage + (kBlockSide + token + t) * 128);
    }
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const float4 w = *reinterpret_cast<const float4*>(stage + (row + r) * 128);
#pragma unroll
      for (int t = 0; t < kTokensOfWarp; ++t) {
        float& its = sum[t / 2][r * 2 + t % 2];
        its = f32_add(its, w, x[t]);
      }
    }
  }
#pragma unroll
  for (int two = 0; two < kTokensOfWarp / 2; ++two) {
    const float v = f32_lanes(sum[two]);
    const int64_t to_row = first_row + row + lane / 2;
    const int64_t to_token = first_token + token + two * 2 + lane % 2;
    if (to_row < rows && to_token < tokens) f32_put(p, to_token, to_row, v);
  }
}

dim3 grid_of(const ProductList& list, int64_t tokens, int side) {
  return dim3(static_cast<unsigned>(list.first_block[list.count]),
              static_cast<unsigned>(ceil_div(tokens, side)));
}

}  // namespace

int run_f32(const Context& ctx, const ProductList& given, int64_t tokens) {
  bool aligned = true;
  for (int i = 0; i < given.count; ++i) aligned = aligned && f32_aligned(given.of[i]);
  const ProductList list = with_blocks(given, kWarps);
  dim3 blocks = grid_of(list, tokens, 1);
  blocks.y = blocks.y < 65535 ? blocks.y : 65535;
  return aligned ? launch(ctx, f32_few_kernel<false, true>, blocks, dim3(256), 0, list, tokens)
                 : launch(ctx, f32_few_kernel<false, false>, blocks, dim3(256), 0, list, tokens);
}

int run_f32_squares(const Context& ctx, const ProductList& given, int64_t tokens) {
  const ProductList list = with_blocks(given, kWarps * kF32Side);
  return launch(ctx, f32_few_kernel<true, true>, grid_of(list, tokens, kF32Side), dim3(256), 0,
                list, tokens);
}

int run_f32_many(const Context& ctx, const ProductList& given, int64_t tokens) {
  constexpr int kBytes = kStages * kStageFloats * static_cast<int>(sizeof(float));
  if (const int error = raise_shared(f32_many_kernel, kBytes); error != 0) return error;
  const ProductList list = with_blocks(given, kBlockSide);
  return launch(ctx, f32_many_kernel, grid_of(list, tokens, kBlockSide), dim3(256), kBytes, list,
                tokens);
}

}  // namespace freshet::cuda

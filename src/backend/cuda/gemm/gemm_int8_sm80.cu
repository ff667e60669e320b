// GEMM of INT8 weights and activations on any GPU since Ampere.
#include "backend/cuda/gemm/gemm_int8.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTokens = 4;  // tiles of 8

// A block computes 16 rows by up to 32 tokens; each warp takes every eighth step of K.
__global__ void __launch_bounds__(256)
    int8_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
  __shared__ int sums[kTokens * 4][32];
  let_next_start();
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const ProductArgs& p = list.of[i];
  const int64_t row_tile = blockIdx.x - list.first_block[i];
  const int64_t token_tile = int64_t{blockIdx.y} * kTokens, act_tiles = (tokens + 7) / 8;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int n = warp; n < kTokens * 4; n += kWarps) sums[n][lane] = 0;
  __syncthreads();
  wait();
  const uint8_t* rows = p.weight.data + tile_at<INT8>(row_tile, p.weight.cols) + lane * 4;
  const auto word = [](const uint8_t* at) { return __ldg(reinterpret_cast<const uint32_t*>(at)); };
  int sum[kTokens][4] = {};
  for (int step = warp; step < int8_steps(p.weight.cols); step += kWarps) {
    const uint8_t* a_tile = rows + step * int64_t{kInt8PanelBytes};
    const uint8_t* b_tile = p.act + step * act_tiles * kInt8TileBytes + lane * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint8_t* at = a_tile + k * 256;
      const uint32_t a[4] = {word(at), word(at + kInt8TileBytes), word(at + 128),
                             word(at + kInt8TileBytes + 128)};
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const int64_t tile = token_tile + j < act_tiles ? token_tile + j : act_tiles - 1;
        const uint8_t* b = b_tile + tile * kInt8TileBytes + k * 256;
        mma_int8(sum[j], a, *reinterpret_cast<const uint32_t*>(b),
                 *reinterpret_cast<const uint32_t*>(b + 128));
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTokens * 4; ++n) atomicAdd(&sums[n][lane], sum[n / 4][n % 4]);
  __syncthreads();
  if (warp >= kTokens || token_tile + warp >= act_tiles) return;
  const float* of_rows = row_scales_of(p.weight) + row_tile * 16 + lane / 4;
  const int64_t token = (token_tile + warp) * 8 + lane % 4 * 2;
  const float* of_tokens = token_scales(p, tokens);
  float v[1][4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float its = token + n % 2 < tokens ? of_tokens[token + n % 2] : 0.0f;
    v[0][n] = int8_value(sums[warp * 4 + n][lane], of_rows[n / 2 * 8], its);
  }
  finish<1>(work_of_int8(p, tokens), v, row_tile, token_tile + warp, lane);
}

}  // namespace

int run_int8(const Context& ctx, const ProductList& list, int64_t tokens) {
  const ProductList tiles = with_blocks(list, 16);
  const dim3 grid(static_cast<unsigned>(tiles.first_block[tiles.count]),
                  static_cast<unsigned>(ceil_div(tokens, kTokens * 8)));
  return launch(ctx, int8_kernel, grid, dim3(256), 0, tiles, tokens);
}

}  // namespace freshet::cuda

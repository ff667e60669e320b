// Second moments of a layer's inputs for calibration: sums += X^T X, in F32.
//
// The order of sums is that of the processor's exact F32 GEMM (backend/cpu/matmul_tiles.inl), so
// the bits are the same: for each block of 32 rows of X, the products of even rows and those of odd
// rows are summed apart, each by FMA in order; both are added, then that to the sum of the blocks
// before, and the whole to what was there. Products of missing rows are 0 and change nothing.
//
// A thread block has a tile of 64 by 64 sums, on or under the diagonal; the same bits go to the
// mirrored tile, since each product is the same both ways. A thread has 4 by 4 of them.
#include "backend/cuda/runtime/common.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kMomentTile = 64;
constexpr int kMomentEach = 4;
constexpr int kMomentRows = 32;  // of X at a time: a block of the order of sums
constexpr int kMomentSide = kMomentTile / kMomentEach;
constexpr int kMomentThreads = kMomentSide * kMomentSide;
constexpr int kMomentQuads = kMomentTile / 4;

using MomentBlock = float4[kMomentRows][kMomentQuads];

// Rows [t0, t0 + 32) and columns [c0, c0 + 64) of x; zeros outside of it. x.cols is a multiple of
// four.
__device__ __forceinline__ void load_block(MomentBlock& to, const Rows& x, int64_t t0, int64_t c0) {
  for (int i = threadIdx.x; i < kMomentRows * kMomentQuads; i += kMomentThreads) {
    const int row = i / kMomentQuads, quad = i % kMomentQuads;
    const int64_t t = t0 + row, c = c0 + 4 * quad;
    const bool there = t < x.rows && c < x.cols;
    to[row][quad] = there ? *reinterpret_cast<const float4*>(x.data + t * x.stride + c)
                          : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

struct Sums4 {
  float of[kMomentEach][kMomentEach];
};

__device__ __forceinline__ void add_row(Sums4& sums, const float4& left, const float4& right) {
  const float l[4] = {left.x, left.y, left.z, left.w};
  const float r[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
  for (int i = 0; i < kMomentEach; ++i) {
#pragma unroll
    for (int j = 0; j < kMomentEach; ++j) sums.of[i][j] = __fmaf_rn(l[i], r[j], sums.of[i][j]);
  }
}

// Grid: the tiles of the lower triangle, row by row.
__global__ void __launch_bounds__(kMomentThreads) add_moments_kernel(float* sums, Rows x) {
  __shared__ MomentBlock left, right;
  let_next_start();
  wait();
  const int64_t tile = blockIdx.x;
  auto row_tile = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(tile) + 1.0) - 1.0) / 2.0);
  while (row_tile * (row_tile + 1) / 2 > tile) --row_tile;
  while ((row_tile + 1) * (row_tile + 2) / 2 <= tile) ++row_tile;
  const int64_t i0 = row_tile * kMomentTile;
  const int64_t j0 = (tile - row_tile * (row_tile + 1) / 2) * kMomentTile;
  const int li = threadIdx.x / kMomentSide, rj = threadIdx.x % kMomentSide;
  Sums4 all{};
  for (int64_t t0 = 0; t0 < x.rows; t0 += kMomentRows) {
    __syncthreads();
    load_block(left, x, t0, i0);
    load_block(right, x, t0, j0);
    __syncthreads();
    Sums4 even{}, odd{};
#pragma unroll 4
    for (int t = 0; t < kMomentRows; t += 2) {
      add_row(even, left[t][li], right[t][rj]);
      add_row(odd, left[t + 1][li], right[t + 1][rj]);
    }
#pragma unroll
    for (int i = 0; i < kMomentEach; ++i) {
#pragma unroll
      for (int j = 0; j < kMomentEach; ++j) {
        all.of[i][j] = __fadd_rn(all.of[i][j], __fadd_rn(even.of[i][j], odd.of[i][j]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kMomentEach; ++i) {
#pragma unroll
    for (int j = 0; j < kMomentEach; ++j) {
      const int64_t row = i0 + li * kMomentEach + i, column = j0 + rj * kMomentEach + j;
      if (row >= x.cols || column > row) continue;
      const float sum = __fadd_rn(sums[row * x.cols + column], all.of[i][j]);
      sums[row * x.cols + column] = sum;
      sums[column * x.cols + row] = sum;
    }
  }
}

}  // namespace

int add_moments(const Context& ctx, float* sums, const Rows* x) {
  const int64_t side = ceil_div(x->cols, kMomentTile);
  return launch(ctx, add_moments_kernel, dim3(static_cast<unsigned>(side * (side + 1) / 2)),
                dim3(kMomentThreads), 0, sums, *x);
}

}  // namespace freshet::cuda

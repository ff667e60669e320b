// Shared by the GEMMs of INT8 weights. Weights and activations are both tiles of 8 rows by 128
// columns (api.h, int.cuh); 128 columns of a tile are one step of K.
//
// Integer sums are exact, so the split of K and the order of additions don't matter: every kernel
// is bit-identical to this epilogue, (sum as F32) * (scale of the row * scale of the token), then
// bias, scale and addition. REQUIRES: at most 2^17 columns, which the loader checks.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"

namespace freshet::cuda {

inline constexpr int kInt8Panel = 8 * kPanelTiles<INT8> * 2;  // rows
static_assert(kInt8Panel == 128);
inline constexpr int kInt8PanelBytes = static_cast<int>(kUnitStep<INT8>);  // per K step

__host__ __device__ inline int int8_steps(int64_t cols) {
  return static_cast<int>((cols + kInt8Cols - 1) / kInt8Cols);
}

// Scales of the tokens, which follow their tiles.
__device__ __forceinline__ const float* token_scales(const ProductArgs& p, int64_t tokens) {
  const int64_t tiles = (tokens + 7) / 8;
  return reinterpret_cast<const float*>(p.act + int8_steps(p.weight.cols) * tiles * kInt8TileBytes);
}
__device__ __forceinline__ const float* row_scales_of(const WeightView& w) {
  return int8_scales(w.data, w.rows, w.cols);
}
__device__ __forceinline__ float int8_value(int sum, float row, float token) {
  return __fmul_rn(__int2float_rn(sum), __fmul_rn(row, token));
}

__device__ __forceinline__ Work work_of_int8(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,  0,       (tokens + 7) / 8,
          p.out,         p.out_stride,  tokens,        p.bias, p.scale, p.add != 0};
}

// d += a b for 32 columns; lanes hold rows and tokens as in mma.m16n8k16.
__device__ __forceinline__ void mma_int8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace freshet::cuda

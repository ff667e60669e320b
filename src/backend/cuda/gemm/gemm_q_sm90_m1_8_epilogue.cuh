// What products of quantised weights with up to eight tokens know of a tile before its sums are
// there.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"

namespace freshet::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ int product_of(const ProductList& list, int index) {
  int i = 0;
  while (i + 1 < list.count && index >= list.first_block[i + 1]) ++i;
  return i;
}

// An address that is known from here on, and not found where it is used.
template <class T>
__device__ __forceinline__ T* known(T* p) {
  size_t at = __cvta_generic_to_global(p);
  asm volatile("" : "+l"(at));
  return static_cast<T*>(__cvta_global_to_generic(at));
}

// A value that is there from here on, and not made where it is used.
__device__ __forceinline__ void keep(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}

// The sum of eight leaves, from left to right.
__device__ __forceinline__ void add_leaves(float (&all)[4], const float4 (&sums)[kWarps][32]) {
#pragma unroll
  for (int l = 0; l < kWarps; ++l) {
    const float4 part = sums[l][threadIdx.x % 32];
    const float each[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) all[n] = l == 0 ? each[n] : __fadd_rn(all[n], each[n]);
  }
}

// Where a lane's sums of a tile go: all that is to be known of it before they are there.
struct End {
  float* to;
  const float* bias;
  int64_t stride;
  float scale;
  uint32_t real;  // bit n: number n is there; bit 4: it is added

  __device__ __forceinline__ End(const ProductList& list, int i, int64_t row_tile, int lane,
                                 int64_t tokens) {
    const ProductArgs& p = list.of[i];
    const int64_t row = row_tile * 16 + lane / 4;
    const int token = lane % 4 * 2;
    to = known(p.out + token * p.out_stride + row);
    bias = p.bias + (p.bias == nullptr ? 0 : row);
    stride = p.out_stride;
    scale = p.scale;
    real = p.add != 0 ? 16 : 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row + n / 2 * 8 < p.weight.rows && token + n % 2 < tokens) real |= 1u << n;
    }
    asm volatile("" : "+l"(stride), "+f"(scale), "+r"(real));
  }
  __device__ __forceinline__ float* at(int n) const { return to + n % 2 * stride + n / 2 * 8; }
  __device__ __forceinline__ void load(float (&before)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((real >> n & 1) != 0) before[n] = *at(n);
    }
  }
  // As finish().
  __device__ __forceinline__ void put(const float (&sum)[4], const float (&before)[4],
                                      float up) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((real >> n & 1) == 0) continue;
      float v = __fmul_rn(sum[n], up);
      if (bias != nullptr) v = __fadd_rn(v, bias[n / 2 * 8]);
      v = __fmul_rn(v, scale);
      *at(n) = real >= 16 ? __fadd_rn(before[n], v) : v;
    }
  }
};
#endif

}  // namespace freshet::cuda

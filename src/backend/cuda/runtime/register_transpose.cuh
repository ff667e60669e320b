// Transposes matrices held in a warp's registers.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace freshet::cuda {

// Transposes a 4 by 4 matrix of words; each of four lanes has a row.
__device__ __forceinline__ uint4 transposed(const uint32_t (&row)[4]) {
  uint32_t v[4] = {row[0], row[1], row[2], row[3]};
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (threadIdx.x & static_cast<unsigned>(step)) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & step) != 0) continue;
      uint32_t &low = v[i], &high = v[i + step];
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? low : high, step);
      (upper ? low : high) = other;
    }
  }
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// Transposes an 8 by 8 BF16 matrix; each lane has two adjacent elements of a row.
__device__ __forceinline__ uint32_t transposed(uint32_t two) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(two));
  return two;
}

}  // namespace freshet::cuda

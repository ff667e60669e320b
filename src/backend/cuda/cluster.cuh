// Blocks of a cluster: waiting for each other, and reading each other's shared memory (Hopper).
#pragma once

#include "backend/cuda/common.cuh"

namespace freshet::cuda {

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// A float at the same place of another block of the cluster.
__device__ __forceinline__ float from_block(const float* p, int rank) {
  float v = 0.0f;
#if __CUDA_ARCH__ >= 900
  uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
#endif
  return v;
}
}  // namespace freshet::cuda

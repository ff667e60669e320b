// Cluster barriers, and access to the shared memory of other blocks of a cluster (Hopper).
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// For a cluster barrier that only makes initialised barriers visible (barriers_ready()): the
// release variant is a fence that waits for all copies in flight.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// The same, not `aligned`: may be called by diverged threads.
__device__ __forceinline__ void cluster_begun() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
// Arrives at a barrier of any block of the cluster; orders reads only.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Stores to a block of the cluster and signals a barrier there; both addresses are from
// place_in_block().
__device__ __forceinline__ void send(uint32_t to, const float (&v)[4], uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::
          "r"(to),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
#endif
}
// The address of p in another block of the cluster.
__device__ __forceinline__ uint32_t place_in_block(const void* p, int rank) {
  uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(p));
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
#endif
  return at;
}
__device__ __forceinline__ float from_block(const float* p, int rank) {
  float v = 0.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(v)
               : "r"(place_in_block(p, rank))
               : "memory");
#endif
  return v;
}
__device__ __forceinline__ float4 from_block(const float4* p, int rank) {
  float4 v = {};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(place_in_block(p, rank))
               : "memory");
#endif
  return v;
}
__device__ __forceinline__ unsigned long long from_block(const unsigned long long* p, int rank) {
  unsigned long long v = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u64 %0, [%1];"
               : "=l"(v)
               : "r"(place_in_block(p, rank))
               : "memory");
#endif
  return v;
}
__device__ __forceinline__ void to_block(float2* p, int rank, float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(place_in_block(p, rank)), "f"(v.x),
               "f"(v.y)
               : "memory");
#endif
}
__device__ __forceinline__ void to_block(float4* p, int rank, const float (&v)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place_in_block(p, rank)),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
#endif
}
// Stores to a block of the cluster and signals a barrier there, at the same addresses as here.
__device__ __forceinline__ void send_to_block(float* p, int rank, float v, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          place_in_block(p, rank)),
      "f"(v), "r"(place_in_block(barrier, rank))
      : "memory");
#endif
}
__device__ __forceinline__ void send_to_block(float2* p, int rank, float2 v, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
          "r"(place_in_block(p, rank)),
      "f"(v.x), "f"(v.y), "r"(place_in_block(barrier, rank))
      : "memory");
#endif
}
}  // namespace freshet::cuda

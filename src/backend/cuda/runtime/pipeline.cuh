// A pipeline of stages in shared memory, between warps that copy and warps that compute (Hopper).
//
// Each stage has two barriers. `full` completes when the bytes that a producer expects have
// arrived; `empty` when every reading warp has released the stage. A side keeps its own place, the
// stage and the parity of its round:
//
//   producer: acquire(at); expect(at.stage, bytes); copies that report to filled(at.stage)
//   consumer: wait(at); reads; release(at.stage), once its reads have ended
//
// then at.advance(stages). With several producers each takes every n-th stage: advance(stages, n).
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
struct PipelineState {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance(int stages, int by = 1) {
    stage += by;
    if (stage >= stages) stage -= stages, phase ^= 1;
  }
};

struct Pipeline {
  uint64_t *full, *empty;

  // One thread; others may use the barriers after barriers_ready() and a __syncthreads().
  __device__ __forceinline__ void init(int stages, int reading_warps) const {
    for (int s = 0; s < stages; ++s) {
      barrier_init(&full[s], 1);
      barrier_init(&empty[s], reading_warps);
    }
    barriers_ready();
  }

  // Waits until the stage's readers of the round before have released it; in the first round there
  // is nothing to wait for, and a fresh barrier says so.
  __device__ __forceinline__ void acquire(const PipelineState& at) const {
    barrier_wait(&empty[at.stage], at.phase ^ 1);
  }
  __device__ __forceinline__ void expect(int stage, uint32_t bytes) const {
    barrier_expect(&full[stage], bytes);
  }
  __device__ __forceinline__ uint64_t* filled(int stage) const { return &full[stage]; }

  __device__ __forceinline__ void wait(const PipelineState& at) const {
    barrier_wait(&full[at.stage], at.phase);
  }
  // All lanes of a warp; one of them arrives.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(&empty[stage]);
  }
};
#endif

}  // namespace freshet::cuda

// Pipelines of stages in shared memory, between producer threads that fill stages and consumer
// warps that read them (Hopper). All producer/consumer pipelines of the plug-in's kernels are built
// from this file.
//
// Each stage has two barriers. `full` completes when the whole stage has arrived: the bytes that
// producers announced, and the arrivals of producers. `empty` completes when every consumer warp
// has released the stage. Each side keeps its own position, a stage and the phase of its barriers:
//
//   producer: acquire(at); expect(at.stage, bytes); bulk copies that report to filled(at.stage)
//   consumer: wait(at); reads; release(at.stage), once its reads have ended
//
// then at.next(stages). Variants:
//
//   several producers of a pipeline take every n-th stage each: at.advance(stages, n);
//   several producers of a stage (init's `producers`) expect their own bytes each, or arrive(stage)
//     if they have none, or if they store instead of copying: a producer that stores operands of
//     wgmma calls shared_for_copies() first;
//   a warp that fills stages for itself has no `empty` barriers (init_own()): a __syncwarp()
//     between its reads and the next copy into the stage is enough;
//   blocks of a cluster that fill each other's stages: release_to_blocks().
//
// Positions and barriers are per thread and hold no shared state; the barriers lie in shared memory
// and belong to the kernel. init() is for one thread; others may use the pipeline after a
// __syncthreads() (within one warp a __syncwarp()), other blocks of a cluster after a cluster
// barrier.
//
// Barriers outside of pipelines: those that complete only once in a kernel, so that there is
// neither a position nor a release (a split-K slice that is copied whole: once_kernel; `near`,
// `here`; sums sent between the blocks of a cluster: `there`, `joined`); test_wait loops that also
// watch the previous kernel's end (landed()), which take a barrier of a pipeline as they find it;
// and stages that a thread fills by cp.async for itself (gemm_sm80_large_m.cu, gemm_f32.cu,
// moe_down_sm90_m1_8.cu), where it waits for its own groups of copies and there is no barrier.
#pragma once

#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
struct PipelineState {
  int stage = 0, phase = 0;

  // Returns whether the next stage is the first one again.
  __device__ __forceinline__ bool next(int stages) {
    if (++stage != stages) return false;
    stage = 0, phase ^= 1;
    return true;
  }
  __device__ __forceinline__ void advance(int stages, int by) {
    stage += by;
    if (stage >= stages) stage -= stages, phase ^= 1;
  }
};

// A position that knows its round, for a side that must know whether it is the first one.
struct PipelineRound {
  int stage = 0, round = 0;

  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, ++round;
  }
  __device__ __forceinline__ operator PipelineState() const { return {stage, round & 1}; }
};

// A position as one number, the stages passed so far: one register instead of two, and cheap if
// the number of stages is a power of two.
template <int kStages>
struct PipelineCount {
  uint32_t count = 0;

  __device__ __forceinline__ void next() { ++count; }
  __device__ __forceinline__ int stage() const { return static_cast<int>(count % kStages); }
  __device__ __forceinline__ int phase() const { return static_cast<int>(count / kStages & 1); }
  __device__ __forceinline__ operator PipelineState() const { return {stage(), phase()}; }
};

// Barriers by their shared address, which a warp can keep in a register.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// The barriers of a pipeline; Barrier is uint64_t* or, by shared address, uint32_t. The barriers of
// adjacent stages are kStride barriers apart.
template <class Barrier, int kStride = 1>
struct PipelineOf {
  Barrier full, empty;

  // One thread. `producers` arrivals fill a stage, and `readers` warps release it.
  __device__ __forceinline__ void init_stage(int stage, int readers, int producers = 1) const {
    barrier_init(filled(stage), producers);
    barrier_init(emptied(stage), readers);
  }
  __device__ __forceinline__ void init(int stages, int readers, int producers = 1) const {
    for (int s = 0; s < stages; ++s) init_stage(s, readers, producers);
    barriers_ready();
  }
  // The same of a warp that fills stages for itself: `empty` is not used.
  __device__ __forceinline__ void init_own(int stages, int producers = 1) const {
    for (int s = 0; s < stages; ++s) barrier_init(filled(s), producers);
    barriers_ready();
  }

  // The barriers of a stage.
  __device__ __forceinline__ Barrier filled(int stage) const { return at_stage(full, stage); }
  __device__ __forceinline__ Barrier emptied(int stage) const { return at_stage(empty, stage); }

  // Waits until the readers of the previous round have released the stage. In the first round a
  // fresh barrier lets it pass at once.
  __device__ __forceinline__ void acquire(const PipelineState& at) const {
    barrier_wait(emptied(at.stage), at.phase ^ 1);
  }
  __device__ __forceinline__ void expect(int stage, uint32_t bytes) const {
    barrier_expect(filled(stage), bytes);
  }
  __device__ __forceinline__ void arrive(int stage) const { barrier_arrive(filled(stage)); }

  __device__ __forceinline__ void wait(const PipelineState& at) const {
    barrier_wait(filled(at.stage), at.phase);
  }
  // Whether wait() would return at once. By address only.
  __device__ __forceinline__ bool is_full(const PipelineState& at) const {
    uint32_t is;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}"
        : "=r"(is)
        : "r"(filled(at.stage)), "r"(at.phase)
        : "memory");
    return is != 0;
  }
  // Called by all lanes of a converged warp; `lane` arrives.
  __device__ __forceinline__ void release(int stage, int lane = 0) const {
    if (static_cast<int>(threadIdx.x % 32) == lane) barrier_arrive(emptied(stage));
  }
  // The same if the blocks of a cluster fill the stage: one lane per block signals that block's
  // barrier. By address only; `blocks` 1: no cluster.
  __device__ __forceinline__ void release_to_blocks(int stage, int blocks) const {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t own = emptied(stage);
    uint32_t in_block = own;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(in_block) : "r"(own), "r"(lane & 1));
    __syncwarp();
    if (lane < blocks) arrive_at(blocks > 1 ? in_block : own);
  }

 private:
  __device__ __forceinline__ static uint64_t* at_stage(uint64_t* first, int stage) {
    return first + stage * kStride;
  }
  __device__ __forceinline__ static uint32_t at_stage(uint32_t first, int stage) {
    return first + static_cast<uint32_t>(stage * (kStride * 8));
  }
};
using Pipeline = PipelineOf<uint64_t*>;
using PipelineAt = PipelineOf<uint32_t>;
#endif

}  // namespace freshet::cuda

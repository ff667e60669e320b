// What a kernel requests before the previous one has ended (Hopper): as much as its pipelines hold,
// but little at a time. Everything that a multiprocessor reads queues behind the copies in flight
// to it, and so would the loads of the small kernel that all the others wait for.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

inline constexpr int kAheadBytes = 48 << 10;  // in flight to a multiprocessor

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Looks up the page of what is read or written once the kernel in front has ended: by then others'
// have taken its place.
__device__ __forceinline__ void look_up_page(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}
// Waits until a barrier's first copies (or those of a parity) have landed, or `ended` is set: who
// waits for the kernel in front does so afterwards, before anybody asks for the barrier's next
// copies. Whether they have.
__device__ __forceinline__ bool landed(uint64_t* barrier, const volatile int& ended,
                                       int parity = 0) {
  uint32_t done = 0;
  while (done == 0 && ended == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
  return done != 0;
}
#endif

}  // namespace freshet::cuda

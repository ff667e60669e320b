// How much a kernel requests before the previous one has ended (Hopper): as much as its pipelines
// hold, but only a little at a time. All reads of an SM queue behind the copies in flight to it,
// including those of the small kernel between two GEMMs that everything waits for.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

inline constexpr int kAheadBytes = 48 << 10;  // in flight per SM

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Looks up the page (TLB) of data that is read or written once the previous kernel has ended: other
// kernels may have evicted the entry.
__device__ __forceinline__ void look_up_page(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}
// Waits until a barrier's first copies (or those of `parity`) have landed or `ended` is set; true
// if they have landed. The caller that waits for the previous kernel must do so after this, and
// before anyone requests the barrier's next copies.
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

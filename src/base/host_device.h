// Functions that the program, launchers and kernels share: plain C++ where no CUDA compiles it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FRESHET_HOST_DEVICE __host__ __device__
#else
#define FRESHET_HOST_DEVICE
#endif

namespace freshet {

// The high 64 bits of a product.
FRESHET_HOST_DEVICE inline uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
#endif
}
// REQUIRES: x != 0.
FRESHET_HOST_DEVICE inline int leading_zeros(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(x));
#else
  return __builtin_clzll(x);
#endif
}

}  // namespace freshet

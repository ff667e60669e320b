// Compiles a plain loop for AVX2 or AVX-512 besides the baseline, selected at run time.
//
// Mark a function FRESHET_TARGET_AVX2 and let it call a FRESHET_INLINE_BODY that the baseline
// version calls too. Call it only if cpu_has_avx2(). The same works with AVX512. All versions do
// the same operations in the same order and so give the same bits (contraction to FMA is off in the
// whole build).
#pragma once

#include <cstdint>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define FRESHET_INLINE_BODY inline __attribute__((always_inline))

#if defined(__x86_64__)
#define FRESHET_TARGET_AVX2 __attribute__((target("avx2")))
#define FRESHET_TARGET_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw")))
namespace freshet {
inline bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") != 0;
}
inline bool cpu_has_avx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512bw") != 0;
}
// Converts half a register of floats to one of doubles, in a function marked AVX2 or AVX512. GCC 12
// would convert them half by half, or one by one.
template <class Floats, class Doubles>
FRESHET_INLINE_BODY void widen(const Floats& from, Doubles& to) {
  asm("vcvtps2pd %1, %0" : "=v"(to) : "v"(from));
}
// Multiplies the low halves of 64-bit lanes; the high halves may hold anything. Registers of 32 and
// 64 bytes in a function marked AVX2 or AVX512 only. GCC 12 would multiply whole lanes.
template <class Lanes>
FRESHET_INLINE_BODY void multiply_low_halves(const Lanes& a, const Lanes& b, Lanes& product) {
  if constexpr (sizeof(Lanes) == 16) {
    product = a;
    asm("pmuludq %1, %0" : "+x"(product) : "x"(b));
  } else {
    asm("vpmuludq %2, %1, %0" : "=v"(product) : "v"(a), "v"(b));
  }
}
}  // namespace freshet
#else
#define FRESHET_TARGET_AVX2
#define FRESHET_TARGET_AVX512
namespace freshet {
inline bool cpu_has_avx2() {
  return false;
}
inline bool cpu_has_avx512() {
  return false;
}
template <class Floats, class Doubles>
FRESHET_INLINE_BODY void widen(const Floats& from, Doubles& to) {
  to = __builtin_convertvector(from, Doubles);
}
template <class Lanes>
FRESHET_INLINE_BODY void multiply_low_halves(const Lanes& a, const Lanes& b, Lanes& product) {
#if defined(__aarch64__)
  if constexpr (sizeof(Lanes) == 16) {
    product = Lanes(vmull_u32(vmovn_u64(uint64x2_t(a)), vmovn_u64(uint64x2_t(b))));
    return;
  }
#endif
  constexpr uint64_t kLow = 0xffffffff;
  product = (a & kLow) * (b & kLow);
}
}  // namespace freshet
#endif

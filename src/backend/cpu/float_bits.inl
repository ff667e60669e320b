// The bits of F32 values, in lanes and as scalars.
#pragma once

#include <cstring>

#include FRESHET_SIMD

namespace freshet::cpu {
namespace {

inline constexpr int32_t kInfinityBits = 0x7f800000;

FRESHET_INLINE float f32_from_bits(int32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Orders like the magnitudes; NaN is the largest.
FRESHET_INLINE I32 magnitude_bits(F32 v) {
  return and_i(bits_i(v), set_i(0x7fffffff));
}

}  // namespace
}  // namespace freshet::cpu

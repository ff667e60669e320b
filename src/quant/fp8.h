// FP8: blocks of 128 8-bit values (E4M3 of the OCP 8-bit Floating Point Specification v1.0: sign, 4
// exponent bits, 3 mantissa bits, no infinity) times an F32 scale; 8.25 bits per value. Published
// scales per tensor, per row or per 128 by 128 values become scales of such blocks. fp8_g32 has
// blocks of 32, 9 bits per value, for rows and published blocks that are not multiples of 128. No
// GGUF type.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "quant/search.h"

namespace freshet::quant {

constexpr float e4m3_to_f32(uint8_t code) {
  const int magnitude = code & 0x7f;
  float v = static_cast<float>(magnitude) / 512.0f;  // subnormal
  if (magnitude >= 8) {
    v = std::bit_cast<float>(static_cast<uint32_t>(magnitude + (120 << 3)) << 20);
  }
  if (magnitude == 0x7f) v = std::numeric_limits<float>::quiet_NaN();
  return code & 0x80 ? -v : v;
}

// Rounds to nearest, ties to even; saturates; NaN stays NaN.
inline uint8_t f32_to_e4m3(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = bits >> 24 & 0x80;
  uint32_t u = bits & 0x7fffffff;
  if (u > 0x7f800000) return static_cast<uint8_t>(sign | 0x7f);
  if (u < std::bit_cast<uint32_t>(0x1p-6f)) {
    // After this addition, the sum holds multiples of 2^-9.
    u = std::bit_cast<uint32_t>(std::bit_cast<float>(u) + 0x1p14f) & 15;
  } else {
    u = ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
    if (u > 0x7e) u = 0x7e;
  }
  return static_cast<uint8_t>(sign | u);
}

inline constexpr auto kE4M3Values = [] {
  std::array<float, 256> v{};
  for (size_t i = 0; i < v.size(); ++i) v[i] = e4m3_to_f32(static_cast<uint8_t>(i));
  return v;
}();

template <Format kOf, int kSize>
struct Fp8Blocks {
  static constexpr Format kFormat = kOf;
  static constexpr std::string_view kName = kSize == 128 ? "fp8" : "fp8_g32";
  static constexpr int kBlockSize = kSize;
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  struct Block {
    uint8_t codes[kSize];
    float scale;
  };
  static_assert(sizeof(Block) == kSize + sizeof(float));

  static void decode(const Block& b, float* out) {
    for (int i = 0; i < kBlockSize; ++i) out[i] = kE4M3Values[b.codes[i]] * b.scale;
  }

  // Tries the scales that map the largest value to one of the eight highest codes.
  static void encode(const float* x, const float* w, Block& b) {
    float most = 0.0f;
    for (int i = 0; i < kBlockSize; ++i) most = std::fmax(most, std::fabs(x[i]));
    b = {};
    if (most < 1e-30f) return;
    float least = std::numeric_limits<float>::max();
    for (uint8_t top = 0x7e; top > 0x76; --top) {
      Block tried;
      tried.scale = most / e4m3_to_f32(top);
      float error = 0.0f;
      for (int i = 0; i < kBlockSize; ++i) {
        tried.codes[i] = f32_to_e4m3(x[i] / tried.scale);
        const float off = (x[i] - e4m3_to_f32(tried.codes[i]) * tried.scale) / most;
        error += w[i] * off * off;
      }
      if (error >= least) continue;
      least = error;
      b = tried;
    }
  }
};

using FP8 = Fp8Blocks<Format::kFP8, 128>;
using FP8G32 = Fp8Blocks<Format::kFP8G32, 32>;

}  // namespace freshet::quant

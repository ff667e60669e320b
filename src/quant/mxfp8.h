// MXFP8: 32 8-bit values (E4M3) that share a power of two (E8M0), after the OCP Microscaling
// Formats specification v1.0; 8.25 bits per value. e = 255 is NaN. No GGUF type.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "quant/fp8.h"

namespace freshet::quant {

// 2^(e - 127), subnormal for e = 0.
inline float e8m0(uint8_t e) {
  if (e == 255) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(e == 0 ? 0x00400000u : uint32_t{e} << 23);
}

struct MXFP8 {
  static constexpr Format kFormat = Format::kMXFP8;
  static constexpr std::string_view kName = "mxfp8";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  struct Block {
    uint8_t codes[32];
    uint8_t e;
  };
  static_assert(sizeof(Block) == 33);

  static void decode(const Block& b, float* out) {
    const float d = e8m0(b.e);
    for (int i = 0; i < kBlockSize; ++i) out[i] = kE4M3Values[b.codes[i]] * d;
  }

  // Tries the least power of two that clips nothing, and half of it.
  static void encode(const float* x, const float* w, Block& b) {
    float most = 0.0f;
    for (int i = 0; i < kBlockSize; ++i) most = std::fmax(most, std::fabs(x[i]));
    b = {};
    if (most < 1e-30f) return;
    int cover = 0;  // most / 448 <= 2^cover
    if (std::frexp(most / 448.0f, &cover) == 0.5f) --cover;
    float least = std::numeric_limits<float>::max();
    for (int exponent = cover; exponent >= cover - 1; --exponent) {
      Block tried;
      tried.e = static_cast<uint8_t>(std::clamp(exponent + 127, 0, 254));
      const float d = e8m0(tried.e);
      float error = 0.0f;
      for (int i = 0; i < kBlockSize; ++i) {
        tried.codes[i] = f32_to_e4m3(x[i] / d);
        const float off = (x[i] - e4m3_to_f32(tried.codes[i]) * d) / most;
        error += w[i] * off * off;
      }
      if (error >= least) continue;
      least = error;
      b = tried;
    }
  }
};

}  // namespace freshet::quant

// INT4 groups: kGroup values d * (q - z), with q and z of 4 bits, as published by GPTQ, AWQ and
// compressed-tensors. d is the first 20 bits of an F32 (12 significant bits, so that F16 and BF16
// are exact) and shares three bytes with z: 4.1875 bits per value in groups of 128, 4.75 in groups
// of 32. Every 32 values are laid out as in Q4_0. No GGUF type.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "quant/search.h"

namespace freshet::quant {

template <Format kOf, int kGroup>
struct Int4 {
  static constexpr Format kFormat = kOf;
  static constexpr std::string_view kName = kGroup == 128 ? "int4_g128" : "int4_g32";
  static constexpr int kBlockSize = kGroup;
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  struct Block {
    uint8_t d[2];  // the F32's upper 16 bits, little-endian
    uint8_t dz;    // its next four bits, then z
    uint8_t qs[kGroup / 2];
  };
  static_assert(sizeof(Block) == 3 + kGroup / 2);

  static void set_scale(Block& b, float d, int zero) {
    const auto bits = std::bit_cast<uint32_t>(d);
    // Rounds to the nearest: only F32 scales have more bits than are stored.
    const uint32_t held = bits + (std::isfinite(d) ? 0x7ff + (bits >> 12 & 1) : 0);
    b.d[0] = static_cast<uint8_t>(held >> 16);
    b.d[1] = static_cast<uint8_t>(held >> 24);
    b.dz = static_cast<uint8_t>((held >> 8 & 0xf0) | static_cast<uint32_t>(zero));
  }
  static float scale(const Block& b) {
    return std::bit_cast<float>(uint32_t{b.d[1]} << 24 | uint32_t{b.d[0]} << 16 |
                                (uint32_t{b.dz} & 0xf0) << 8);
  }
  static int zero(const Block& b) { return b.dz & 15; }

  static void decode(const Block& b, float* out) {
    const float d = scale(b);
    const int z = zero(b);
    for (int i = 0; i < kGroup; ++i) {
      const int byte = b.qs[i / 32 * 16 + i % 16];
      out[i] = d * static_cast<float>((byte >> (i % 32 / 16 * 4) & 15) - z);
    }
  }

  // Tries the zero points next to the range's own, with scales that cover the range, cover a part
  // of it or fit the chosen levels. Keeps the pair with the least error.
  static void encode(const float* x, const float* w, Block& b) {
    const auto [least, most] = std::minmax_element(x, x + kGroup);
    const float low = std::fmin(*least, 0.0f), high = std::fmax(*most, 0.0f);
    const float range = (high - low) / 15.0f;
    b = {};
    set_scale(b, 0.0f, 0);
    if (!(range > 1e-30f)) return;
    const int zero_at = static_cast<int>(std::nearbyint(-low / range));
    float best = std::numeric_limits<float>::max();
    const auto try_scale = [&](float d, int zero) {
      Block trial = {};
      set_scale(trial, d, zero);
      Fit fit;
      quantize(x, w, trial, fit);
      if (fit.error < best) best = fit.error, b = trial;
      return fit.xq > 0.0f ? fit.xq / fit.qq : d;
    };
    for (int zero = std::max(zero_at - 1, 0); zero <= std::min(zero_at + 1, 15); ++zero) {
      for (const float part : {1.0f, 0.9f, 0.8f, 0.7f}) {
        try_scale(try_scale(range * part, zero), zero);
      }
    }
  }

 private:
  struct Fit {
    float error = 0.0f;
    float xq = 0.0f, qq = 0.0f;  // weighted sums of value times level, and of level squared
  };
  // Finds the levels nearest to x for b's scale and zero point.
  static void quantize(const float* x, const float* w, Block& b, Fit& fit) {
    const float d = scale(b), inverse = 1.0f / d;
    const int z = zero(b);
    for (int i = 0; i < kGroup; ++i) {
      const int q = std::clamp(static_cast<int>(std::nearbyint(x[i] * inverse)) + z, 0, 15);
      b.qs[i / 32 * 16 + i % 16] |= static_cast<uint8_t>(q << (i % 32 / 16 * 4));
      const auto level = static_cast<float>(q - z);
      const float off = x[i] - d * level;
      fit.error += w[i] * off * off;
      fit.xq += w[i] * x[i] * level;
      fit.qq += w[i] * level * level;
    }
  }
};

using Int4G128 = Int4<Format::kInt4G128, 128>;
using Int4G32 = Int4<Format::kInt4G32, 32>;

}  // namespace freshet::quant

// Groups of integers: kGroup values d * (q - z), with q and z of 2, 3 or 8 bits, as published
// by GPTQ and compressed-tensors. d is the first 24 bits of an F32 (16 significant bits, so that
// F16 and BF16 are exact) and shares four bytes with z: 0.25 bits more per value in groups of 128,
// one bit in groups of 32. No GGUF type.
//
// Every 32 values have their low two bits in eight bytes (value i in byte i % 8, from bit 2 (i / 8)
// on) and, with three bits, the high bits in four more (value i in byte i % 4, bit i / 4); values
// of eight bits are bytes in order.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/search.h"

namespace freshet::quant {

template <Format kOf, int kBits, int kGroup>
struct IntGroup {
  static_assert(kBits == 2 || kBits == 3 || kBits == 8);
  static constexpr Format kFormat = kOf;
  static constexpr std::string_view kName = kBits == 2 ? (kGroup == 128 ? "int2_g128" : "int2_g32")
                                            : kBits == 3
                                                ? (kGroup == 128 ? "int3_g128" : "int3_g32")
                                                : (kGroup == 128 ? "int8_g128" : "int8_g32");
  static constexpr int kBlockSize = kGroup;
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  static constexpr int kTop = (1 << kBits) - 1;
  struct Block {
    uint8_t qs[kGroup * kBits / 8];
    uint8_t zd[4];  // z, then the upper 24 bits of d, little-endian
  };
  static_assert(sizeof(Block) == kGroup * kBits / 8 + 4);

  static void set_scale(Block& b, float d, int zero) {
    const auto bits = std::bit_cast<uint32_t>(d);
    // Rounds to the nearest: only F32 scales have more bits than are stored.
    const uint32_t held = bits + (std::isfinite(d) ? 0x7f + (bits >> 8 & 1) : 0);
    const uint32_t word = (held & 0xffffff00) | static_cast<uint32_t>(zero);
    for (int i = 0; i < 4; ++i) b.zd[i] = static_cast<uint8_t>(word >> (8 * i));
  }
  static float scale(const Block& b) {
    return std::bit_cast<float>(uint32_t{b.zd[3]} << 24 | uint32_t{b.zd[2]} << 16 |
                                uint32_t{b.zd[1]} << 8);
  }
  static int zero(const Block& b) { return b.zd[0]; }

  static int level(const Block& b, int i) {
    if constexpr (kBits == 8) return b.qs[i];
    const uint8_t* const part = b.qs + i / 32 * (kBits * 4);
    const int k = i % 32;
    const int low = part[k % 8] >> (k / 8 * 2) & 3;
    return kBits == 2 ? low : low | (part[8 + k % 4] >> (k / 4) & 1) << 2;
  }
  // The level's bits must be zero in b.
  static void set_level(Block& b, int i, int q) {
    if constexpr (kBits == 8) {
      b.qs[i] = static_cast<uint8_t>(q);
    } else {
      uint8_t* const part = b.qs + i / 32 * (kBits * 4);
      const int k = i % 32;
      part[k % 8] |= static_cast<uint8_t>((q & 3) << (k / 8 * 2));
      if constexpr (kBits == 3) part[8 + k % 4] |= static_cast<uint8_t>((q >> 2) << (k / 4));
    }
  }

  static void decode(const Block& b, float* out) {
    const float d = scale(b);
    const int z = zero(b);
    for (int i = 0; i < kGroup; ++i) out[i] = d * static_cast<float>(level(b, i) - z);
  }

  // Tries the zero points next to the range's own, with scales that cover the range, cover a part
  // of it or fit the chosen levels. Keeps the pair with the least error.
  static void encode(const float* x, const float* w, Block& b) {
    const auto [least, most] = std::minmax_element(x, x + kGroup);
    const float low = std::fmin(*least, 0.0f), high = std::fmax(*most, 0.0f);
    const float range = (high - low) / static_cast<float>(kTop);
    b = {};
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
    for (int zero = std::max(zero_at - 1, 0); zero <= std::min(zero_at + 1, kTop); ++zero) {
      for (const float part : {1.0f, 0.9f, 0.8f, 0.7f, 0.6f}) {
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
      const int q = std::clamp(static_cast<int>(std::nearbyint(x[i] * inverse)) + z, 0, kTop);
      set_level(b, i, q);
      const auto value = static_cast<float>(q - z);
      const float off = x[i] - d * value;
      fit.error += w[i] * off * off;
      fit.xq += w[i] * x[i] * value;
      fit.qq += w[i] * value * value;
    }
  }
};

using Int2G128 = IntGroup<Format::kInt2G128, 2, 128>;
using Int2G32 = IntGroup<Format::kInt2G32, 2, 32>;
using Int3G128 = IntGroup<Format::kInt3G128, 3, 128>;
using Int3G32 = IntGroup<Format::kInt3G32, 3, 32>;
using Int8G128 = IntGroup<Format::kInt8G128, 8, 128>;
using Int8G32 = IntGroup<Format::kInt8G32, 8, 32>;

}  // namespace freshet::quant

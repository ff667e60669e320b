// Q4_K: 256 values in 8 groups of 32, (d * scale) * q - dmin * min, with q of 4 bits and a scale
// and minimum of 6 bits per group; 4.5 bits per value. Within every 64 values, byte i holds value i
// in its low nibble and value i + 32 in its high nibble.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

// The eight 6-bit scales and minima of Q4_K and Q5_K in 12 bytes. Groups 0..3 are in the low six
// bits of bytes g (scale) and g + 4 (minimum). Groups 4..7 have their low four bits in the nibbles
// of byte g + 4 and their high two bits on top of bytes g - 4 (scale) and g (minimum).
struct ScaleMin {
  uint8_t scale;
  uint8_t min;
};

inline ScaleMin unpack_scale_min(const uint8_t* s, int g) {
  if (g < 4) return {static_cast<uint8_t>(s[g] & 63), static_cast<uint8_t>(s[g + 4] & 63)};
  return {static_cast<uint8_t>((s[g + 4] & 15) | (s[g - 4] >> 6 << 4)),
          static_cast<uint8_t>((s[g + 4] >> 4) | (s[g] >> 6 << 4))};
}

// `s` must be zero at first.
inline void pack_scale_min(uint8_t* s, int g, ScaleMin v) {
  if (g < 4) {
    s[g] |= v.scale;
    s[g + 4] |= v.min;
    return;
  }
  s[g + 4] |= static_cast<uint8_t>((v.scale & 15) | ((v.min & 15) << 4));
  s[g - 4] |= static_cast<uint8_t>(v.scale >> 4 << 6);
  s[g] |= static_cast<uint8_t>(v.min >> 4 << 6);
}

struct Q4_K {
  static constexpr Format kFormat = Format::kQ4_K;
  static constexpr std::string_view kName = "q4_k";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 12;
  struct Block {
    uint16_t d;     // f16
    uint16_t dmin;  // f16
    uint8_t scales[12];
    uint8_t qs[128];
  };
  static_assert(sizeof(Block) == 144);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    const float dmin = f16_to_f32(b.dmin);
    for (int g = 0; g < 8; ++g) {
      const ScaleMin s = unpack_scale_min(b.scales, g);
      const float dl = d * static_cast<float>(s.scale);
      const float ml = dmin * static_cast<float>(s.min);
      const uint8_t* qs = b.qs + g / 2 * 32;
      for (int i = 0; i < 32; ++i) {
        out[g * 32 + i] = dl * static_cast<float>((qs[i] >> (g % 2 * 4)) & 15) - ml;
      }
    }
  }

  using Fit = AffineSuperBlock<8>;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_affine_super_block<8>(x, w, 15, 63, s);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    b.dmin = s.dmin;
    for (int g = 0; g < 8; ++g) pack_scale_min(b.scales, g, {s.scale[g], s.min[g]});
    for (int i = 0; i < 256; ++i) {
      b.qs[i / 64 * 32 + i % 32] |= static_cast<uint8_t>(s.q[i] << (i % 64 / 32 * 4));
    }
  }
};

}  // namespace freshet::quant

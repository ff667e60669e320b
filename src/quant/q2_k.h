// Q2_K: 256 values in 16 groups of 16, (d * scale) * q - dmin * min, with q of 2 bits and a scale
// and minimum of 4 bits per group; 2.625 bits per value. Within every 128 values, byte i holds
// values i, i + 32, i + 64 and i + 96 from its low bits up.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q2_K {
  static constexpr Format kFormat = Format::kQ2_K;
  static constexpr std::string_view kName = "q2_k";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 10;
  struct Block {
    uint8_t scales[16];  // scale in the low nibble, minimum in the high nibble
    uint8_t qs[64];
    uint16_t d;     // f16
    uint16_t dmin;  // f16
  };
  static_assert(sizeof(Block) == 84);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    const float dmin = f16_to_f32(b.dmin);
    for (int i = 0; i < 256; ++i) {
      const uint8_t s = b.scales[i / 16];
      const int q = (b.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
      out[i] = (d * static_cast<float>(s & 15)) * static_cast<float>(q) -
               dmin * static_cast<float>(s >> 4);
    }
  }

  using Fit = AffineSuperBlock<16>;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_affine_super_block<16>(x, w, 3, 15, s);
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
    for (int g = 0; g < 16; ++g) b.scales[g] = static_cast<uint8_t>(s.scale[g] | (s.min[g] << 4));
    for (int i = 0; i < 256; ++i) {
      b.qs[i / 128 * 32 + i % 32] |= static_cast<uint8_t>(s.q[i] << (i % 128 / 32 * 2));
    }
  }
};

}  // namespace freshet::quant

// Q3_K: 256 values in 16 groups of 16, (d * (scale - 32)) * (q - 4), with q of 3 bits and a scale
// of 6 bits per group; 3.4375 bits per value. The low two bits are stored as in Q2_K; bit g of
// hmask[i] is the high bit of value 32 g + i. Scale j < 8 has its low four bits in the low nibble
// of byte j, scale j + 8 in the high nibble; bytes 8..11 hold the high pairs of scales j, j + 4, j
// + 8, j + 12 from the low bits up.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q3_K {
  static constexpr Format kFormat = Format::kQ3_K;
  static constexpr std::string_view kName = "q3_k";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 11;
  struct Block {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    uint16_t d;  // f16
  };
  static_assert(sizeof(Block) == 110);

  static int scale(const Block& b, int g) {
    const int low = g < 8 ? b.scales[g] & 15 : b.scales[g - 8] >> 4;
    const int high = (b.scales[8 + g % 4] >> (g / 4 * 2)) & 3;
    return (low | (high << 4)) - 32;
  }

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int g = 0; g < 16; ++g) {
      const float dl = d * static_cast<float>(scale(b, g));
      for (int i = g * 16; i < g * 16 + 16; ++i) {
        const int low = (b.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
        const int high = (b.hmask[i % 32] >> (i / 32)) & 1;
        out[i] = dl * static_cast<float>((low | (high << 2)) - 4);
      }
    }
  }

  using Fit = SymmetricSuperBlock<16>;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_symmetric_super_block<16>(x, w, LinearGrid{-4, 3}, -32, 31, s);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    for (int g = 0; g < 16; ++g) {
      const int v = s.scale[g] + 32;
      b.scales[g % 8] |= static_cast<uint8_t>((v & 15) << (g < 8 ? 0 : 4));
      b.scales[8 + g % 4] |= static_cast<uint8_t>((v >> 4) << (g / 4 * 2));
    }
    for (int i = 0; i < 256; ++i) {
      const int v = s.q[i] + 4;
      b.qs[i / 128 * 32 + i % 32] |= static_cast<uint8_t>((v & 3) << (i % 128 / 32 * 2));
      b.hmask[i % 32] |= static_cast<uint8_t>((v >> 2) << (i / 32));
    }
  }
};

}  // namespace freshet::quant

// IQ4_XS: 256 values in 8 groups of 32, (d * (scale - 32)) * level[q], with the levels of IQ4_NL
// and a 6-bit scale per group; 4.25 bits per value. Bytes of a group as in IQ4_NL. Scale g has its
// low four bits in nibble g % 2 of scales_l[g / 2] and its high pair at bit 2 g of scales_h.
#pragma once

#include "quant/iq4_nl.h"

namespace freshet::quant {

struct IQ4_XS {
  static constexpr Format kFormat = Format::kIQ4_XS;
  static constexpr std::string_view kName = "iq4_xs";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 23;
  struct Block {
    uint16_t d;  // f16
    uint16_t scales_h;
    uint8_t scales_l[4];
    uint8_t qs[128];
  };
  static_assert(sizeof(Block) == 136);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int g = 0; g < 8; ++g) {
      const int low = (b.scales_l[g / 2] >> (g % 2 * 4)) & 15;
      const int high = (b.scales_h >> (g * 2)) & 3;
      const float dl = d * static_cast<float>((low | (high << 4)) - 32);
      const uint8_t* qs = b.qs + g * 16;
      for (int i = 0; i < 16; ++i) {
        out[g * 32 + i] = dl * static_cast<float>(kIq4Levels[qs[i] & 15]);
        out[g * 32 + i + 16] = dl * static_cast<float>(kIq4Levels[qs[i] >> 4]);
      }
    }
  }

  using Fit = SymmetricSuperBlock<8>;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_symmetric_super_block<8>(x, w, TableGrid{kIq4Levels}, -32, 31, s);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    for (int g = 0; g < 8; ++g) {
      const int v = s.scale[g] + 32;
      b.scales_l[g / 2] |= static_cast<uint8_t>((v & 15) << (g % 2 * 4));
      b.scales_h |= static_cast<uint16_t>((v >> 4) << (g * 2));
      const int8_t* q = s.q + g * 32;
      for (int i = 0; i < 16; ++i) {
        b.qs[g * 16 + i] = static_cast<uint8_t>(iq4_index(q[i]) | (iq4_index(q[i + 16]) << 4));
      }
    }
  }
};

}  // namespace freshet::quant

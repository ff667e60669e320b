// IQ3_S: 256 values in 8 groups of 32, (d * (2 scale + 1)) * g, with g from a grid of 512 entries
// of 4 magnitudes, a sign per value, and a 4-bit scale per group; 3.4375 bits per value. Bit l of
// qh[g] is the high bit of index l of group g.
#pragma once

#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ3_S {
  static constexpr Format kFormat = Format::kIQ3_S;
  static constexpr std::string_view kName = "iq3_s";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 21;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[64];
    uint8_t qh[8];
    uint8_t signs[32];
    uint8_t scales[4];
  };
  static_assert(sizeof(Block) == 110);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int g = 0; g < 8; ++g) {
      const int scale = b.scales[g / 2] >> (g % 2 * 4) & 15;
      const float dl = d * static_cast<float>(2 * scale + 1);
      for (int l = 0; l < 8; ++l) {
        const int entry = b.qs[8 * g + l] | (b.qh[g] >> l & 1) << 8;
        const uint32_t signs = b.signs[4 * g + l / 2] >> (l % 2 * 4);
        decode_entry(kGridIQ3_S, entry, signs, dl, out + 32 * g + 4 * l);
      }
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    b.d = s.d;
    for (int k = 0; k < 64; ++k) {
      b.qs[k] = static_cast<uint8_t>(s.entry[k]);
      b.qh[k / 8] |= static_cast<uint8_t>((s.entry[k] >> 8) << (k % 8));
    }
    for (int k = 0; k < 32; ++k) b.signs[k] = s.minus[k];
    for (int g = 0; g < 8; ++g) {
      b.scales[g / 2] |= static_cast<uint8_t>(s.scale[g] << (g % 2 * 4));
    }
  }
};

}  // namespace freshet::quant

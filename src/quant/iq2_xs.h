// IQ2_XS: 256 values in 16 groups of 16, (d * (scale + 1/2) / 4) * g, with g from a grid of 512
// entries of 8 magnitudes with seven stored signs, and a 4-bit scale per group; 2.3125 bits per
// value. A word of qs is an index and, above it, the signs.
#pragma once

#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ2_XS {
  static constexpr Format kFormat = Format::kIQ2_XS;
  static constexpr std::string_view kName = "iq2_xs";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 17;
  struct Block {
    uint16_t d;  // f16
    uint16_t qs[32];
    uint8_t scales[8];
  };
  static_assert(sizeof(Block) == 74);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int k = 0; k < 32; ++k) {
      const int scale = b.scales[k / 4] >> (k / 2 % 2 * 4) & 15;
      const float dl = d * (static_cast<float>(scale) + 0.5f) * 0.25f;
      decode_entry(kGridIQ2_XS, b.qs[k] & 511, iq_even_signs(b.qs[k] >> 9), dl, out + 8 * k);
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    b.d = s.d;
    for (int k = 0; k < 32; ++k) {
      b.qs[k] = static_cast<uint16_t>(s.entry[k] | (s.minus[k] & 127) << 9);
    }
    for (int g = 0; g < 16; ++g) {
      b.scales[g / 2] |= static_cast<uint8_t>(s.scale[g] << (g % 2 * 4));
    }
  }
};

}  // namespace freshet::quant

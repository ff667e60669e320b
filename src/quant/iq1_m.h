// IQ1_M: 256 values in 16 groups of 16, (d * (2 scale + 1)) * (g + delta), with the grid of IQ1_S,
// a 3-bit scale per group, and delta of 1/8 or -1/8 per entry of 8 values; 1.75 bits per value.
// Nibble k of qh holds the high three bits of index k and the sign of its delta. Each of the four
// words of scales holds the scales of four groups from the low bits up, and above them a nibble of
// d (an f16), the lowest in the first word.
#pragma once

#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ1_M {
  static constexpr Format kFormat = Format::kIQ1_M;
  static constexpr std::string_view kName = "iq1_m";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 29;
  struct Block {
    uint8_t qs[32];
    uint8_t qh[16];
    uint16_t scales[4];
  };
  static_assert(sizeof(Block) == 56);

  static void decode(const Block& b, float* out) {
    uint32_t half = 0;
    for (int i = 0; i < 4; ++i) half |= static_cast<uint32_t>(b.scales[i] >> 12) << (4 * i);
    const float d = f16_to_f32(static_cast<uint16_t>(half));
    for (int k = 0; k < 32; ++k) {
      const int g = k / 2;
      const float dl = d * static_cast<float>(2 * (b.scales[g / 4] >> (3 * (g % 4)) & 7) + 1);
      const int high = b.qh[k / 2] >> (4 * (k % 2));
      const float delta = (high & 8) != 0 ? -0.125f : 0.125f;
      const int entry = b.qs[k] | (high & 7) << 8;
      for (int i = 0; i < 8; ++i) {
        out[8 * k + i] = dl * (static_cast<float>(kGridIQ1.value(entry, i) - 1) + delta);
      }
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    for (int i = 0; i < 4; ++i) b.scales[i] = static_cast<uint16_t>((s.d >> (4 * i) & 15) << 12);
    for (int g = 0; g < 16; ++g) {
      b.scales[g / 4] |= static_cast<uint16_t>(s.scale[g] << (3 * (g % 4)));
    }
    for (int k = 0; k < 32; ++k) {
      b.qs[k] = static_cast<uint8_t>(s.entry[k]);
      const int high = s.entry[k] >> 8 | (s.minus[k] != 0 ? 8 : 0);
      b.qh[k / 2] |= static_cast<uint8_t>(high << (4 * (k % 2)));
    }
  }
};

}  // namespace freshet::quant

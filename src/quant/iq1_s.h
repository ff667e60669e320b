// IQ1_S: 256 values in 8 groups of 32, (d * (2 scale + 1)) * (g + delta), with g of -1, 0, 1 from a
// grid of 2,048 entries of 8 values, a 3-bit scale per group, and delta of 1/8 or -1/8 per group;
// 1.5625 bits per value. qh of a group holds the high three bits of its four indices from the low
// bits up, then the scale, and the sign of delta in its highest bit.
#pragma once

#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ1_S {
  static constexpr Format kFormat = Format::kIQ1_S;
  static constexpr std::string_view kName = "iq1_s";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 19;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[32];
    uint16_t qh[8];
  };
  static_assert(sizeof(Block) == 50);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int k = 0; k < 32; ++k) {
      const uint16_t h = b.qh[k / 4];
      const float dl = d * static_cast<float>(2 * (h >> 12 & 7) + 1);
      const float delta = (h & 0x8000) != 0 ? -0.125f : 0.125f;
      const int entry = b.qs[k] | (h >> (3 * (k % 4)) & 7) << 8;
      for (int i = 0; i < 8; ++i) {
        out[8 * k + i] = dl * (static_cast<float>(kGridIQ1.value(entry, i) - 1) + delta);
      }
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    b.d = s.d;
    for (int g = 0; g < 8; ++g) {
      b.qh[g] = static_cast<uint16_t>(s.scale[g] << 12 | (s.minus[4 * g] != 0 ? 0x8000 : 0));
    }
    for (int k = 0; k < 32; ++k) {
      b.qs[k] = static_cast<uint8_t>(s.entry[k]);
      b.qh[k / 4] |= static_cast<uint16_t>((s.entry[k] >> 8) << (3 * (k % 4)));
    }
  }
};

}  // namespace freshet::quant

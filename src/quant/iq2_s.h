// IQ2_S: 256 values in 16 groups of 16, (d * (scale + 1/2) / 4) * g, with g from a grid of 1,024
// entries of 8 magnitudes with eight signs, and a 4-bit scale per group; 2.5625 bits per value.
// Byte k of qs and two bits of qh, from the low bits up, are index k.
#pragma once

#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ2_S {
  static constexpr Format kFormat = Format::kIQ2_S;
  static constexpr std::string_view kName = "iq2_s";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 22;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[32];
    uint8_t signs[32];
    uint8_t qh[8];
    uint8_t scales[8];
  };
  static_assert(sizeof(Block) == 82);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int k = 0; k < 32; ++k) {
      const int scale = b.scales[k / 4] >> (k / 2 % 2 * 4) & 15;
      const float dl = d * (static_cast<float>(scale) + 0.5f) * 0.25f;
      const int entry = b.qs[k] | (b.qh[k / 4] >> (k % 4 * 2) & 3) << 8;
      decode_entry(kGridIQ2_S, entry, b.signs[k], dl, out + 8 * k);
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    b.d = s.d;
    for (int k = 0; k < 32; ++k) {
      b.qs[k] = static_cast<uint8_t>(s.entry[k]);
      b.qh[k / 4] |= static_cast<uint8_t>((s.entry[k] >> 8) << (k % 4 * 2));
      b.signs[k] = s.minus[k];
    }
    for (int g = 0; g < 16; ++g) {
      b.scales[g / 2] |= static_cast<uint8_t>(s.scale[g] << (g % 2 * 4));
    }
  }
};

}  // namespace freshet::quant

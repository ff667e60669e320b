// IQ2_XXS: 256 values in 8 groups of 32, (d * (scale + 1/2) / 4) * g, with g from a grid of 256
// entries of 8 magnitudes with seven stored signs, and a 4-bit scale per group; 2.0625 bits per
// value. A group is four bytes of indices and a dword: the signs of its entries, seven bits each
// from the low bits up, then the scale.
#pragma once

#include <cstring>
#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ2_XXS {
  static constexpr Format kFormat = Format::kIQ2_XXS;
  static constexpr std::string_view kName = "iq2_xxs";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 16;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[64];
  };
  static_assert(sizeof(Block) == 66);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int g = 0; g < 8; ++g) {
      uint32_t rest;
      std::memcpy(&rest, b.qs + 8 * g + 4, sizeof rest);
      const float dl = d * (static_cast<float>(rest >> 28) + 0.5f) * 0.25f;
      for (int l = 0; l < 4; ++l) {
        decode_entry(kGridIQ2_XXS, b.qs[8 * g + l], iq_even_signs(rest >> (7 * l) & 127), dl,
                     out + 32 * g + 8 * l);
      }
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    b.d = s.d;
    for (int g = 0; g < 8; ++g) {
      uint32_t rest = static_cast<uint32_t>(s.scale[g]) << 28;
      for (int l = 0; l < 4; ++l) {
        b.qs[8 * g + l] = static_cast<uint8_t>(s.entry[4 * g + l]);
        rest |= (s.minus[4 * g + l] & 127u) << (7 * l);
      }
      std::memcpy(b.qs + 8 * g + 4, &rest, sizeof rest);
    }
  }
};

}  // namespace freshet::quant

// IQ3_XXS: 256 values in 8 groups of 32, (d * (scale + 1/2) / 2) * g, with g from a grid of 256
// entries of 4 magnitudes, seven stored signs per two entries, and a 4-bit scale per group; 3.0625
// bits per value. After the 64 indices, each group has a dword as in IQ2_XXS.
#pragma once

#include <cstring>
#include <string_view>

#include "quant/iq_grids.h"
#include "quant/search_grid.h"

namespace freshet::quant {

struct IQ3_XXS {
  static constexpr Format kFormat = Format::kIQ3_XXS;
  static constexpr std::string_view kName = "iq3_xxs";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 18;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[64];
    uint8_t rest[32];
  };
  static_assert(sizeof(Block) == 98);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int g = 0; g < 8; ++g) {
      uint32_t rest;
      std::memcpy(&rest, b.rest + 4 * g, sizeof rest);
      const float dl = d * (static_cast<float>(rest >> 28) + 0.5f) * 0.5f;
      for (int l = 0; l < 8; ++l) {
        const uint32_t signs = iq_even_signs(rest >> (l / 2 * 7) & 127) >> (l % 2 * 4);
        decode_entry(kGridIQ3_XXS, b.qs[8 * g + l], signs, dl, out + 32 * g + 4 * l);
      }
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    GridBlock s;
    fit_grid_block(kFormat, x, w, s);
    b = {};
    b.d = s.d;
    for (int k = 0; k < 64; ++k) b.qs[k] = static_cast<uint8_t>(s.entry[k]);
    for (int g = 0; g < 8; ++g) {
      uint32_t rest = static_cast<uint32_t>(s.scale[g]) << 28;
      for (int l = 0; l < 4; ++l) rest |= (s.minus[4 * g + l] & 127u) << (7 * l);
      std::memcpy(b.rest + 4 * g, &rest, sizeof rest);
    }
  }
};

}  // namespace freshet::quant

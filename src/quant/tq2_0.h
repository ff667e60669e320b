// TQ2_0: 256 values d * (q - 1) with q of 2 bits; 2.0625 bits per value. Ternary weights use q up
// to 2. The values are stored as in Q2_K.
#pragma once

#include <string_view>

#include "quant/search_grid.h"

namespace freshet::quant {

struct TQ2_0 {
  static constexpr Format kFormat = Format::kTQ2_0;
  static constexpr std::string_view kName = "tq2_0";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 35;
  struct Block {
    uint8_t qs[64];
    uint16_t d;  // f16
  };
  static_assert(sizeof(Block) == 66);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int i = 0; i < 256; ++i) {
      const int q = b.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
      out[i] = d * static_cast<float>(q - 1);
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    int8_t q[256];
    b = {};
    b.d = fit_ternary_block(x, w, q);
    for (int i = 0; i < 256; ++i) {
      b.qs[i / 128 * 32 + i % 32] |= static_cast<uint8_t>((q[i] + 1) << (i % 128 / 32 * 2));
    }
  }
};

}  // namespace freshet::quant

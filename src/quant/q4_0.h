// Q4_0: 32 values d * (q - 8), with q of 4 bits; 4.5 bits per value. Byte i holds value i in its
// low nibble and value i + 16 in its high nibble.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q4_0 {
  static constexpr Format kFormat = Format::kQ4_0;
  static constexpr std::string_view kName = "q4_0";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 2;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[16];
  };
  static_assert(sizeof(Block) == 18);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>((b.qs[i] & 15) - 8);
      out[i + 16] = d * static_cast<float>((b.qs[i] >> 4) - 8);
    }
  }

  using Fit = SymmetricBlock;
  static void fit(const float* x, const float* w, Fit& s) {
    s.d = fit_symmetric_block<32>(x, w, -8, 7, s.q);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    for (int i = 0; i < 16; ++i) {
      b.qs[i] = static_cast<uint8_t>((s.q[i] + 8) | ((s.q[i + 16] + 8) << 4));
    }
  }
};

}  // namespace freshet::quant

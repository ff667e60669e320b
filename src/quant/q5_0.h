// Q5_0: 32 values d * (q - 16), with q of 5 bits; 5.5 bits per value. Low four bits as in Q4_0; bit
// i of the little-endian word `qh` is the high bit of value i.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q5_0 {
  static constexpr Format kFormat = Format::kQ5_0;
  static constexpr std::string_view kName = "q5_0";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 6;
  struct Block {
    uint16_t d;  // f16
    uint8_t qh[4];
    uint8_t qs[16];
  };
  static_assert(sizeof(Block) == 22);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int i = 0; i < 32; ++i) {
      const int low = i < 16 ? b.qs[i] & 15 : b.qs[i - 16] >> 4;
      const int high = (b.qh[i / 8] >> (i % 8)) & 1;
      out[i] = d * static_cast<float>((low | (high << 4)) - 16);
    }
  }

  using Fit = SymmetricBlock;
  static void fit(const float* x, const float* w, Fit& s) {
    s.d = fit_symmetric_block<32>(x, w, -16, 15, s.q);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    for (int i = 0; i < 32; ++i) {
      const int v = s.q[i] + 16;
      b.qs[i % 16] |= static_cast<uint8_t>((v & 15) << (i < 16 ? 0 : 4));
      b.qh[i / 8] |= static_cast<uint8_t>((v >> 4) << (i % 8));
    }
  }
};

}  // namespace freshet::quant

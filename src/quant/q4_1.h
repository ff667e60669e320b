// Q4_1: 32 values d * q + m, with q of 4 bits; 5 bits per value. Nibbles as in Q4_0.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q4_1 {
  static constexpr Format kFormat = Format::kQ4_1;
  static constexpr std::string_view kName = "q4_1";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 3;
  struct Block {
    uint16_t d;  // f16
    uint16_t m;  // f16
    uint8_t qs[16];
  };
  static_assert(sizeof(Block) == 20);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    const float m = f16_to_f32(b.m);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>(b.qs[i] & 15) + m;
      out[i + 16] = d * static_cast<float>(b.qs[i] >> 4) + m;
    }
  }

  using Fit = AffineBlock;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_affine_block<32>(x, w, 15, s.q, s.d, s.m);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    b.m = s.m;
    for (int i = 0; i < 16; ++i) b.qs[i] = static_cast<uint8_t>(s.q[i] | (s.q[i + 16] << 4));
  }
};

}  // namespace freshet::quant

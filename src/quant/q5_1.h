// Q5_1: 32 values d * q + m, with q of 5 bits; 6 bits per value. Bits as in Q5_0.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q5_1 {
  static constexpr Format kFormat = Format::kQ5_1;
  static constexpr std::string_view kName = "q5_1";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 7;
  struct Block {
    uint16_t d;  // f16
    uint16_t m;  // f16
    uint8_t qh[4];
    uint8_t qs[16];
  };
  static_assert(sizeof(Block) == 24);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    const float m = f16_to_f32(b.m);
    for (int i = 0; i < 32; ++i) {
      const int low = i < 16 ? b.qs[i] & 15 : b.qs[i - 16] >> 4;
      const int high = (b.qh[i / 8] >> (i % 8)) & 1;
      out[i] = d * static_cast<float>(low | (high << 4)) + m;
    }
  }

  using Fit = AffineBlock;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_affine_block<32>(x, w, 31, s.q, s.d, s.m);
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
    for (int i = 0; i < 32; ++i) {
      b.qs[i % 16] |= static_cast<uint8_t>((s.q[i] & 15) << (i < 16 ? 0 : 4));
      b.qh[i / 8] |= static_cast<uint8_t>((s.q[i] >> 4) << (i % 8));
    }
  }
};

}  // namespace freshet::quant

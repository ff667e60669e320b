// Q8_0: 32 values d * q, with q a signed byte; 8.5 bits per value. The encoder writes q only in
// [-127, 127], so that kernels may negate it; decoding accepts -128.
#pragma once

#include <algorithm>

#include "quant/search.h"

namespace freshet::quant {

struct Q8_0 {
  static constexpr Format kFormat = Format::kQ8_0;
  static constexpr std::string_view kName = "q8_0";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 8;
  struct Block {
    uint16_t d;  // f16
    int8_t qs[32];
  };
  static_assert(sizeof(Block) == 34);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(b.qs[i]) * d;
  }

  using Fit = SymmetricBlock;
  static void fit(const float* x, const float* w, Fit& s) {
    s.d = fit_symmetric_block<32>(x, w, -127, 127, s.q);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b.d = s.d;
    std::copy_n(s.q, 32, b.qs);
  }
};

}  // namespace freshet::quant

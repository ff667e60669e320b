// Q6_K: 256 values in 16 groups of 16, (d * scale) * (q - 32), with q of 6 bits and a signed byte
// as the scale of each group; 6.5625 bits per value. Within every 128 values, ql[i] (i < 64) holds
// the low four bits of values i and i + 64, and qh[i] (i < 32) the high pairs of values i, i + 32,
// i + 64 and i + 96.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

struct Q6_K {
  static constexpr Format kFormat = Format::kQ6_K;
  static constexpr std::string_view kName = "q6_k";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 14;
  struct Block {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;  // f16
  };
  static_assert(sizeof(Block) == 210);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int g = 0; g < 16; ++g) {
      const float dl = d * static_cast<float>(b.scales[g]);
      for (int i = g * 16; i < g * 16 + 16; ++i) {
        const int half = i / 128;
        const int low = (b.ql[half * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
        const int high = (b.qh[half * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3;
        out[i] = dl * static_cast<float>((low | (high << 4)) - 32);
      }
    }
  }

  using Fit = SymmetricSuperBlock<16>;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_symmetric_super_block<16>(x, w, LinearGrid{-32, 31}, -128, 127, s);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    for (int g = 0; g < 16; ++g) b.scales[g] = static_cast<int8_t>(s.scale[g]);
    for (int i = 0; i < 256; ++i) {
      const int half = i / 128;
      const int v = s.q[i] + 32;
      b.ql[half * 64 + i % 64] |= static_cast<uint8_t>((v & 15) << (i % 128 / 64 * 4));
      b.qh[half * 32 + i % 32] |= static_cast<uint8_t>((v >> 4) << (i % 128 / 32 * 2));
    }
  }
};

}  // namespace freshet::quant

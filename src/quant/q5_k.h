// Q5_K: as Q4_K, with q of 5 bits; 5.5 bits per value. Bit g of qh[i] is the high bit of value 32 g
// + i.
#pragma once

#include "quant/q4_k.h"

namespace freshet::quant {

struct Q5_K {
  static constexpr Format kFormat = Format::kQ5_K;
  static constexpr std::string_view kName = "q5_k";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 13;
  struct Block {
    uint16_t d;     // f16
    uint16_t dmin;  // f16
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
  };
  static_assert(sizeof(Block) == 176);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    const float dmin = f16_to_f32(b.dmin);
    for (int g = 0; g < 8; ++g) {
      const ScaleMin s = unpack_scale_min(b.scales, g);
      const float dl = d * static_cast<float>(s.scale);
      const float ml = dmin * static_cast<float>(s.min);
      const uint8_t* qs = b.qs + g / 2 * 32;
      for (int i = 0; i < 32; ++i) {
        const int q = ((qs[i] >> (g % 2 * 4)) & 15) | (((b.qh[i] >> g) & 1) << 4);
        out[g * 32 + i] = dl * static_cast<float>(q) - ml;
      }
    }
  }

  using Fit = AffineSuperBlock<8>;
  static void fit(const float* x, const float* w, Fit& s) {
    fit_affine_super_block<8>(x, w, 31, 63, s);
  }
  static void encode(const float* x, const float* w, Block& b) {
    Fit s;
    fit(x, w, s);
    store(s, b);
  }
  static void store(const Fit& s, Block& b) {
    b = {};
    b.d = s.d;
    b.dmin = s.dmin;
    for (int g = 0; g < 8; ++g) pack_scale_min(b.scales, g, {s.scale[g], s.min[g]});
    for (int i = 0; i < 256; ++i) {
      b.qs[i / 64 * 32 + i % 32] |= static_cast<uint8_t>((s.q[i] & 15) << (i % 64 / 32 * 4));
      b.qh[i % 32] |= static_cast<uint8_t>((s.q[i] >> 4) << (i / 32));
    }
  }
};

}  // namespace freshet::quant

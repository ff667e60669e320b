// IQ4_NL: 32 values d * level[q], where the 4-bit q indexes a fixed table of uneven levels; 4.5
// bits per value. Nibbles as in Q4_0.
#pragma once

#include "quant/search.h"

namespace freshet::quant {

inline constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};

// The index of a level in the table.
inline int iq4_index(int level) {
  int i = 0;
  while (i < 15 && kIq4Levels[i] < level) ++i;
  return i;
}

struct IQ4_NL {
  static constexpr Format kFormat = Format::kIQ4_NL;
  static constexpr std::string_view kName = "iq4_nl";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 20;
  struct Block {
    uint16_t d;  // f16
    uint8_t qs[16];
  };
  static_assert(sizeof(Block) == 18);

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>(kIq4Levels[b.qs[i] & 15]);
      out[i + 16] = d * static_cast<float>(kIq4Levels[b.qs[i] >> 4]);
    }
  }

  using Fit = SymmetricBlock;
  static void fit(const float* x, const float* w, Fit& s) {
    s.d = fit_table_block<32>(x, w, kIq4Levels, s.q);
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
      b.qs[i] = static_cast<uint8_t>(iq4_index(s.q[i]) | (iq4_index(s.q[i + 16]) << 4));
    }
  }
};

}  // namespace freshet::quant

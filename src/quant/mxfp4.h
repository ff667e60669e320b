// MXFP4: 32 4-bit values (E2M1: sign, 2 exponent bits, 1 mantissa bit) that share a power of two
// (E8M0), after the OCP Microscaling Formats specification v1.0; 4.25 bits per value. Nibbles as in
// Q4_0. Levels are doubled to make them integers, so the shared scale is halved.
#pragma once

#include <bit>

#include "quant/search.h"

namespace freshet::quant {

inline constexpr int8_t kE2M1Doubled[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

// 2^(e - 128), subnormal for e < 2. (In the specification e = 255 is NaN; for GGUF readers it is
// not.)
inline float e8m0_half(uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : uint32_t{e - 1u} << 23);
}

// The code of a doubled level in the table.
inline int e2m1_code(int level) {
  const int magnitude = level < 0 ? -level : level;
  int code = 0;
  while (code < 7 && kE2M1Doubled[code] < magnitude) ++code;
  return level < 0 ? code | 8 : code;
}

struct MXFP4 {
  static constexpr Format kFormat = Format::kMXFP4;
  static constexpr std::string_view kName = "mxfp4";
  static constexpr int kBlockSize = 32;
  static constexpr uint32_t kGgmlType = 39;
  struct Block {
    uint8_t e;
    uint8_t qs[16];
  };
  static_assert(sizeof(Block) == 17);

  static void decode(const Block& b, float* out) {
    const float d = e8m0_half(b.e);
    for (int i = 0; i < 16; ++i) {
      out[i] = d * static_cast<float>(kE2M1Doubled[b.qs[i] & 15]);
      out[i + 16] = d * static_cast<float>(kE2M1Doubled[b.qs[i] >> 4]);
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    static constexpr int8_t kSorted[16] = {-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12};
    int8_t q[32];
    const int exponent = fit_power_block<32>(x, w, kSorted, -126, 126, q);
    b.e = static_cast<uint8_t>(exponent + 128);
    for (int i = 0; i < 16; ++i) {
      b.qs[i] = static_cast<uint8_t>(e2m1_code(q[i]) | (e2m1_code(q[i + 16]) << 4));
    }
  }
};

}  // namespace freshet::quant

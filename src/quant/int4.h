// INT4 groups: kGroup numbers d * (q - z), q and z of 4 bits: what GPTQ, AWQ and compressed-tensors
// publish. d is the first 20 bits of an F32 (12 significant ones, so that F16 and BF16 are held
// exactly) and shares three bytes with z: 4.1875 bits a number in groups of 128, 4.75 in groups of
// 32. Each 32 numbers lie as in Q4_0. No GGUF type.
#pragma once

#include <bit>
#include <cmath>

#include "quant/search.h"

namespace freshet::quant {

template <Format kOf, int kGroup>
struct Int4 {
  static constexpr Format kFormat = kOf;
  static constexpr std::string_view kName = kGroup == 128 ? "int4_g128" : "int4_g32";
  static constexpr int kBlockSize = kGroup;
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  struct Block {
    uint8_t d[2];  // the F32's upper 16 bits, little-endian
    uint8_t dz;    // the next four of them, then z
    uint8_t qs[kGroup / 2];
  };
  static_assert(sizeof(Block) == 3 + kGroup / 2);

  static void set_scale(Block& b, float d, int zero) {
    const auto bits = std::bit_cast<uint32_t>(d);
    // To the nearest: F32 scales alone have more bits than are held.
    const uint32_t held = bits + (std::isfinite(d) ? 0x7ff + (bits >> 12 & 1) : 0);
    b.d[0] = static_cast<uint8_t>(held >> 16);
    b.d[1] = static_cast<uint8_t>(held >> 24);
    b.dz = static_cast<uint8_t>((held >> 8 & 0xf0) | static_cast<uint32_t>(zero));
  }
  static float scale(const Block& b) {
    return std::bit_cast<float>(uint32_t{b.d[1]} << 24 | uint32_t{b.d[0]} << 16 |
                                (uint32_t{b.dz} & 0xf0) << 8);
  }
  static int zero(const Block& b) { return b.dz & 15; }

  static void decode(const Block& b, float* out) {
    const float d = scale(b);
    const int z = zero(b);
    for (int i = 0; i < kGroup; ++i) {
      const int byte = b.qs[i / 32 * 16 + i % 16];
      out[i] = d * static_cast<float>((byte >> (i % 32 / 16 * 4) & 15) - z);
    }
  }
};

using Int4G128 = Int4<Format::kInt4G128, 128>;
using Int4G32 = Int4<Format::kInt4G32, 32>;

}  // namespace freshet::quant

// NF4 and FP4 of bitsandbytes: 64 values, each one of 16 levels times the block's F32 scale; 4.5
// bits per value. Value i is in nibble i % 8 of dword i / 8, from the low bits up. Doubly quantised
// scales are stored as the F32 that they mean. No GGUF type.
#pragma once

#include <cmath>
#include <limits>

#include "quant/levels4.h"
#include "quant/search.h"

namespace freshet::quant {

template <Format kOf>
struct Codebook4 {
  static constexpr Format kFormat = kOf;
  static constexpr std::string_view kName = kOf == Format::kNF4 ? "nf4" : "fp4";
  static constexpr const float (&kLevels)[16] = kOf == Format::kNF4 ? kNf4Levels : kFp4Levels;
  static constexpr int kBlockSize = 64;
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  struct Block {
    uint8_t qs[32];
    float scale;
  };
  static_assert(sizeof(Block) == 36);

  static void decode(const Block& b, float* out) {
    for (int i = 0; i < kBlockSize; ++i)
      out[i] = kLevels[b.qs[i / 2] >> (i % 2 * 4) & 15] * b.scale;
  }

  // Tries scales from the largest magnitude down to six tenths of it, each also refitted to the
  // levels that it chose.
  static void encode(const float* x, const float* w, Block& b) {
    float most = 0.0f;
    for (int i = 0; i < kBlockSize; ++i) most = std::fmax(most, std::fabs(x[i]));
    b = {};
    for (uint8_t& two : b.qs) two = static_cast<uint8_t>(kZeroCode | kZeroCode << 4);
    if (most < 1e-30f) return;
    float least = std::numeric_limits<float>::max();
    const auto try_scale = [&](float scale) {
      Block tried = {};
      tried.scale = scale;
      float error = 0.0f, xq = 0.0f, qq = 0.0f;
      for (int i = 0; i < kBlockSize; ++i) {
        const int code = nearest(x[i] / scale);
        tried.qs[i / 2] |= static_cast<uint8_t>(code << (i % 2 * 4));
        const float level = kLevels[code], value = x[i] / most;
        const float off = value - level * (scale / most);
        error += w[i] * off * off;
        xq += w[i] * value * level;
        qq += w[i] * level * level;
      }
      if (error < least) least = error, b = tried;
      return xq > 0.0f ? xq / qq * most : scale;
    };
    for (int i = 0; i < 9; ++i) {
      try_scale(try_scale(most * (1.0f - 0.05f * static_cast<float>(i))));
    }
  }

 private:
  static constexpr int kZeroCode = kOf == Format::kNF4 ? 7 : 0;
  static int nearest(float x) {
    int best = 0;
    for (int i = 1; i < 16; ++i) {
      if (std::fabs(kLevels[i] - x) < std::fabs(kLevels[best] - x)) best = i;
    }
    return best;
  }
};

using NF4 = Codebook4<Format::kNF4>;
using FP4 = Codebook4<Format::kFP4>;

}  // namespace freshet::quant

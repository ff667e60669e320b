// NVFP4: a row is an F32 scale, then blocks of 16 4-bit values (E2M1) that share an 8-bit scale
// (E4M3); 4.5 bits per value and 4 bytes per row. A value is level * (block scale * row scale). In
// files the F32 belongs to a whole tensor: compressed-tensors stores its reciprocal, ModelOpt the
// factor. Value i of a block is in the low half of byte i, value i + 8 in the high half. No GGUF
// type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/fp8.h"
#include "quant/mxfp4.h"

namespace freshet::quant {

struct NVFP4 {
  static constexpr Format kFormat = Format::kNVFP4;
  static constexpr std::string_view kName = "nvfp4";
  static constexpr int kBlockSize = 16;
  static constexpr int kHeadBytes = sizeof(float);
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  struct Block {
    uint8_t scale;  // E4M3
    uint8_t qs[8];
  };
  static_assert(sizeof(Block) == 9);

  static void decode(const uint8_t* row, int64_t first, float* out, int64_t n) {
    float whole;
    std::memcpy(&whole, row, sizeof whole);
    for (int64_t i = 0; i < n; i += kBlockSize, out += kBlockSize) {
      const uint8_t* const b = row + kHeadBytes + (first + i) / kBlockSize * sizeof(Block);
      const float d = kE4M3Values[b[0]] * whole;
      for (int k = 0; k < 8; ++k) {
        out[k] = 0.5f * static_cast<float>(kE2M1Doubled[b[1 + k] & 15]) * d;
        out[k + 8] = 0.5f * static_cast<float>(kE2M1Doubled[b[1 + k] >> 4]) * d;
      }
    }
  }

  // The row's scale is the least power of two that lets the block scales reach the largest value,
  // so that encoding decoded values changes little. Each block takes the best of the codes around
  // the one that just covers it.
  static void encode(const float* in, uint8_t* row, int64_t n, const float* importance) {
    std::memset(
        row, 0,
        static_cast<size_t>(kHeadBytes) + static_cast<size_t>(n / kBlockSize) * sizeof(Block));
    float most = 0.0f;
    for (int64_t i = 0; i < n; i += kBlockSize) {
      float x[kBlockSize], w[kBlockSize];
      prepare_block(in + i, nullptr, kBlockSize, x, w);
      for (const float v : x) most = std::fmax(most, std::fabs(v));
    }
    if (most < 1e-30f) return;
    int exponent = 0;
    if (std::frexp(most / (448.0f * 6.0f), &exponent) == 0.5f) --exponent;
    const float whole = std::ldexp(1.0f, std::max(exponent, -126));
    std::memcpy(row, &whole, sizeof whole);
    uint8_t* to = row + kHeadBytes;
    for (int64_t i = 0; i < n; i += kBlockSize, to += sizeof(Block)) {
      float x[kBlockSize], w[kBlockSize];
      prepare_block(in + i, importance != nullptr ? importance + i : nullptr, kBlockSize, x, w);
      encode_block(x, w, whole, to);
    }
  }

 private:
  static void encode_block(const float* x, const float* w, float whole, uint8_t* to) {
    float most = 0.0f;
    for (int i = 0; i < kBlockSize; ++i) most = std::fmax(most, std::fabs(x[i]));
    const int cover = f32_to_e4m3(most / 6.0f / whole);
    float least = std::numeric_limits<float>::max();
    for (int code = std::min(cover + 2, 0x7e); code >= std::max(cover - 6, 1); --code) {
      const float d = kE4M3Values[static_cast<size_t>(code)] * whole;
      uint8_t tried[sizeof(Block)] = {static_cast<uint8_t>(code)};
      float error = 0.0f;
      for (int i = 0; i < kBlockSize; ++i) {
        const int q = nearest(x[i] / d);
        tried[1 + i % 8] |= static_cast<uint8_t>(q << (i / 8 * 4));
        const float off =
            most > 0.0f ? (x[i] - 0.5f * static_cast<float>(kE2M1Doubled[q]) * d) / most : 0.0f;
        error += w[i] * off * off;
      }
      if (error >= least) continue;
      least = error;
      std::memcpy(to, tried, sizeof tried);
    }
  }
  // The code of the level nearest to x; of two, the even code.
  static int nearest(float x) {
    constexpr float kBetween[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const float size = std::fabs(x);
    int code = 0;
    while (code < 7 && (size > kBetween[code] || (size == kBetween[code] && code % 2 == 1))) ++code;
    return x < 0.0f && code > 0 ? code | 8 : code;
  }
};

}  // namespace freshet::quant

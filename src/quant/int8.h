// INT8: a row is an F32 scale, then one signed byte per value, scale * q; 8 bits per value and 4
// bytes per row. The int-quantized format of compressed-tensors: symmetric, [-128, 127]. No GGUF
// type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/format.h"

namespace freshet::quant {

struct INT8 {
  static constexpr Format kFormat = Format::kINT8;
  static constexpr std::string_view kName = "int8";
  static constexpr int kBlockSize = 1;
  // The longest row whose sum of products of -128 and 127 fits in 32 bits.
  static constexpr int64_t kMostCols = int64_t{1} << 17;
  static constexpr int kHeadBytes = sizeof(float);  // the scale
  static constexpr uint32_t kGgmlType = kNoGgmlType;
  using Block = int8_t;

  static void decode(const uint8_t* row, int64_t first, float* out, int64_t n) {
    float scale;
    std::memcpy(&scale, row, sizeof scale);
    const uint8_t* const codes = row + kHeadBytes + first;
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
    }
  }

  // Chooses, of the scales that map the largest magnitude to 127, 127.5 (as in llm-compressor) or
  // 128, the one with the least error. NaN is stored as zero.
  static void encode(const float* in, uint8_t* row, int64_t n, const float* importance) {
    float most = 0.0f;
    for (int64_t i = 0; i < n; ++i) most = std::fmax(most, std::fabs(in[i]));
    most = std::fmin(most, std::numeric_limits<float>::max());
    std::memset(row, 0, static_cast<size_t>(kHeadBytes + n));
    if (most < 1e-30f) return;
    double least = std::numeric_limits<double>::max();
    float best = 0.0f;
    for (const float top : {127.0f, 127.5f, 128.0f}) {
      const float scale = most / top;
      double error = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        const double off = (in[i] - static_cast<float>(code(in[i], scale)) * scale) / most;
        error += (importance != nullptr ? importance[i] : 1.0f) * off * off;
      }
      if (error >= least) continue;
      least = error;
      best = scale;
    }
    if (best == 0.0f) best = most / 127.0f;
    std::memcpy(row, &best, sizeof best);
    for (int64_t i = 0; i < n; ++i) row[kHeadBytes + i] = static_cast<uint8_t>(code(in[i], best));
  }

 private:
  static int8_t code(float x, float scale) {
    if (std::isnan(x)) return 0;
    return static_cast<int8_t>(std::clamp(std::nearbyint(x / scale), -128.0f, 127.0f));
  }
};

}  // namespace freshet::quant

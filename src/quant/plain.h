// F32, F16 and BF16: formats with a block size of one value.
#pragma once

#include <cstring>
#include <string_view>

#include "quant/format.h"
#include "tensor/dtype.h"

namespace freshet::quant {

struct F32 {
  static constexpr Format kFormat = Format::kF32;
  static constexpr std::string_view kName = "f32";
  static constexpr int kBlockSize = 1;
  static constexpr uint32_t kGgmlType = 0;
  using Block = float;

  static void decode(const Block& b, float* out) { *out = b; }
  static void encode(const float* x, const float*, Block& b) { b = *x; }
};

struct F16 {
  static constexpr Format kFormat = Format::kF16;
  static constexpr std::string_view kName = "f16";
  static constexpr int kBlockSize = 1;
  static constexpr uint32_t kGgmlType = 1;
  using Block = uint16_t;

  static void decode(const Block& b, float* out) { *out = f16_to_f32(b); }
  static void encode(const float* x, const float*, Block& b) { b = f32_to_f16(*x); }
};

struct BF16 {
  static constexpr Format kFormat = Format::kBF16;
  static constexpr std::string_view kName = "bf16";
  static constexpr int kBlockSize = 1;
  static constexpr uint32_t kGgmlType = 30;
  using Block = uint16_t;

  static void decode(const Block& b, float* out) { *out = bf16_to_f32(b); }
  static void encode(const float* x, const float*, Block& b) { b = f32_to_bf16(*x); }
};

}  // namespace freshet::quant

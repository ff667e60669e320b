// Plain element types and their exact conversions. Quantised block formats are in quant/.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace freshet {

enum class DType : uint8_t { kF32, kF16, kBF16, kI8, kU8, kI32, kI64 };

constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kI64:
      return 8;
    case DType::kI8:
    case DType::kU8:
      return 1;
  }
  return 0;
}
std::string_view name_of(DType t);

inline float bf16_to_f32(uint16_t h) {
  return std::bit_cast<float>(uint32_t{h} << 16);
}
// Round to nearest even; NaN stays NaN (quiet).
inline uint16_t f32_to_bf16(float f) {
  uint32_t u = std::bit_cast<uint32_t>(f);
  if ((u & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);  // round to nearest even, overflow to infinity

}  // namespace freshet

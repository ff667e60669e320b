#include "tensor/dtype.h"

namespace freshet {

std::string_view name_of(DType t) {
  switch (t) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kI8:
      return "i8";
    case DType::kU8:
      return "u8";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  return "?";
}

float f16_to_f32(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16;
  const uint32_t rest = h & 0x7fffu;
  if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | ((rest & 0x3ff) << 13));
  if (rest >= 0x400) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000));
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;  // zero and subnormals
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

uint16_t f32_to_f16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  const uint32_t a = u & 0x7fffffff;
  if (a > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((a >> 13) & 0x3ff));
  if (a >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
  if (a < 0x38800000) {
    // The sum's unit in the last place is 2^-24, so the addition itself rounds to a subnormal.
    const float r = std::bit_cast<float>(a) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(r) - 0x3f000000));
  }
  const uint32_t rounded = a + 0xfff + ((a >> 13) & 1) - 0x38000000;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

}  // namespace freshet

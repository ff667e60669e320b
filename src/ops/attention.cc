#include "ops/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tensor/dtype.h"

namespace freshet::ops {

Result<KvType> kv_type_by_name(std::string_view name) {
  if (name == "f32") return KvType::kF32;
  if (name == "f16") return KvType::kF16;
  if (name == "bf16") return KvType::kBF16;
  if (name == "fp8") return KvType::kFP8;
  if (name == "int8") return KvType::kInt8;
  return invalid_argument("unknown cache type \"{}\"; known: f32 f16 bf16 fp8 int8", name);
}

std::string_view name_of(KvType type) {
  switch (type) {
    case KvType::kF32:
      return "f32";
    case KvType::kF16:
      return "f16";
    case KvType::kBF16:
      return "bf16";
    case KvType::kFP8:
      return "fp8";
    case KvType::kInt8:
      return "int8";
  }
  return "?";
}

size_t element_bytes(KvType type) {
  if (type == KvType::kFP8 || type == KvType::kInt8) return 1;
  return type == KvType::kF32 ? 4 : 2;
}

Int8Scale int8_scale(uint32_t largest) {
  const auto most = std::bit_cast<float>(largest);
  if (std::isnan(most)) return {f32_to_f16(most), 0.0f};
  const uint16_t bits = f32_to_f16(std::min(most / 127.0f, 65504.0f));
  const float scale = f16_to_f32(bits);
  return {bits, scale > 0.0f ? 1.0f / scale : 0.0f};
}

size_t KvShape::head_bytes() const {
  const int features = key_dim + (value_is_key_prefix ? 0 : value_dim);
  const int scales = scales_of(key_dim) + (value_is_key_prefix ? 0 : scales_of(value_dim));
  size_t token = element_bytes(type) * static_cast<size_t>(features);
  if (type == KvType::kInt8) token += sizeof(uint16_t) * static_cast<size_t>(scales);
  return kBlockTokens * token;
}

size_t KvShape::block_bytes() const {
  return (static_cast<size_t>(kv_heads) * head_bytes() + 63) / 64 * 64;
}

}  // namespace freshet::ops

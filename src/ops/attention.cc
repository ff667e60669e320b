#include "ops/attention.h"

namespace freshet::ops {

Result<KvType> kv_type_by_name(std::string_view name) {
  if (name == "f32") return KvType::kF32;
  if (name == "f16") return KvType::kF16;
  if (name == "bf16") return KvType::kBF16;
  if (name == "fp8") return KvType::kFP8;
  return invalid_argument("unknown cache type \"{}\"; known: f32 f16 bf16 fp8", name);
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
  }
  return "?";
}

size_t element_bytes(KvType type) {
  return type == KvType::kF32 ? 4 : type == KvType::kFP8 ? 1 : 2;
}

size_t KvShape::block_bytes() const {
  const int features = key_dim + (value_is_key_prefix ? 0 : value_dim);
  const size_t bytes = element_bytes(type) * kBlockTokens * static_cast<size_t>(kv_heads) *
                       static_cast<size_t>(features);
  return (bytes + 63) / 64 * 64;
}

}  // namespace freshet::ops

#include "ops/kv_type.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "tensor/dtype.h"

namespace freshet::ops {
namespace {

constexpr float kF16Max = 65504.0f;

KvScale scale_from(float scale) {
  const uint16_t bits = f32_to_f16(std::clamp(scale, -kF16Max, kF16Max));
  const float stored = f16_to_f32(bits);
  return {bits, stored != 0.0f ? 1.0f / stored : 0.0f};
}

// llama.cpp's names of our formats.
std::string_view llama_name(const KvFormat& f) {
  switch (f.code) {
    case KvCode::kF32:
      return "f32";
    case KvCode::kF16:
      return "f16";
    case KvCode::kBF16:
      return "bf16";
    case KvCode::kInt8:
      return "q8_0";
    case KvCode::kInt4:
      return "q4_0";
    case KvCode::kE4M3:
      break;
  }
  return {};
}

}  // namespace

std::string kv_type_names(std::string_view separator) {
  std::string names;
  for (const KvTypeInfo& type : kKvTypes) {
    if (!names.empty()) names += separator;
    names += type.name;
  }
  return names;
}

Result<KvType> kv_type_by_name(std::string_view name) {
  for (int i = 0; i < kKvTypeCount; ++i) {
    if (kKvTypes[i].name == name) return static_cast<KvType>(i);
  }
  return invalid_argument("unknown cache type \"{}\"; known: {}", name, kv_type_names(" "));
}

Result<KvType> kv_type_by_llama_names(std::string_view key, std::string_view value) {
  std::string known;
  for (int i = 0; i < kKvTypeCount; ++i) {
    const std::string_view k = llama_name(kKvTypes[i].key), v = llama_name(kKvTypes[i].value);
    if (k.empty() || v.empty()) continue;
    if (k == key && v == value) return static_cast<KvType>(i);
    known += fmt::format("{}{}/{}", known.empty() ? "" : ", ", k, v);
  }
  return invalid_argument("no cache keeps keys as {} and values as {}; there are {}", key, value,
                          known);
}

KvScale int8_scale(uint32_t largest) {
  const auto most = std::bit_cast<float>(largest);
  if (std::isnan(most)) return {f32_to_f16(most), 0.0f};
  return scale_from(most / 127.0f);
}

KvScale int4_scale(float least, float most, float sum) {
  if (std::isnan(sum)) return {f32_to_f16(sum), 0.0f};
  return scale_from((most >= -least ? most : least) / -8.0f);
}

}  // namespace freshet::ops

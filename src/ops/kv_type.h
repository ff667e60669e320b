// How keys and values are stored: one table of descriptors, for the host and for devices.
//
// A type names a format for keys and one for values. A format stores elements individually, or as
// codes that share a scale: one F16 for each `group` features of a token's head. Codes and scales
// depend on that token alone, never on its neighbours, on the batch or on earlier tokens, so that a
// result doesn't depend on how a prompt was chunked. Formats with `rotated` store a head's vector
// after a Hadamard transform (rotation_size()), which spreads outlier features over the others.
// Everything here is pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::ops {

// kE4M3 has no scale and saturates at the largest value, 448. kInt8: integers in [-127, 127] times
// a scale, as in llama.cpp's q8_0. kInt4: integers in [-8, 7] times a scale, as in its q4_0.
enum class KvCode : uint8_t { kF32, kF16, kBF16, kE4M3, kInt8, kInt4 };

struct KvFormat {
  KvCode code = KvCode::kF16;
  int bits = 16;         // per code
  int group = 0;         // features that share an F16 scale; 0: no scales
  bool rotated = false;  // stored after a Hadamard transform of each head
};

enum class KvType : uint8_t { kF32, kF16, kBF16, kFP8, kInt8, kInt4, kK8V4 };

struct KvTypeInfo {
  std::string_view name;
  KvFormat key, value;
};

inline constexpr int kScaledFeatures = 32;  // features per scale, in formats with scales

// In the order of KvType.
inline constexpr KvTypeInfo kKvTypes[] = {
    {"f32", {KvCode::kF32, 32}, {KvCode::kF32, 32}},
    {"f16", {KvCode::kF16, 16}, {KvCode::kF16, 16}},
    {"bf16", {KvCode::kBF16, 16}, {KvCode::kBF16, 16}},
    {"fp8", {KvCode::kE4M3, 8}, {KvCode::kE4M3, 8}},
    {"int8", {KvCode::kInt8, 8, kScaledFeatures}, {KvCode::kInt8, 8, kScaledFeatures}},
    {"int4", {KvCode::kInt4, 4, kScaledFeatures, true}, {KvCode::kInt4, 4, kScaledFeatures, true}},
    {"k8v4", {KvCode::kInt8, 8, kScaledFeatures}, {KvCode::kInt4, 4, kScaledFeatures, true}},
};
inline constexpr int kKvTypeCount = static_cast<int>(std::size(kKvTypes));

constexpr const KvTypeInfo& info(KvType type) {
  return kKvTypes[static_cast<size_t>(type)];
}
constexpr std::string_view name_of(KvType type) {
  return info(type).name;
}
Result<KvType> kv_type_by_name(std::string_view name);
// The type with llama.cpp's names, such as q8_0, for keys and for values.
Result<KvType> kv_type_by_llama_names(std::string_view key, std::string_view value);
std::string kv_type_names(std::string_view separator);

// Whether keys or values have 4-bit codes: the kernels for these have block layouts of their own,
// and don't support caches in which a value is a prefix of its key (MLA).
constexpr bool has_int4(KvType type) {
  return info(type).key.code == KvCode::kInt4 || info(type).value.code == KvCode::kInt4;
}
// Bytes per element, for types whose keys and values are whole bytes without a transform.
constexpr size_t element_bytes(KvType type) {
  return static_cast<size_t>(info(type).key.bits) / 8;
}

constexpr int scales_of(int features) {
  return (features + kScaledFeatures - 1) / kScaledFeatures;
}
// Bytes of a token's codes. Rows of 4-bit codes are padded to whole groups.
constexpr size_t code_bytes(const KvFormat& f, int features) {
  if (f.code == KvCode::kInt4) return static_cast<size_t>(scales_of(features)) * f.group / 2;
  return static_cast<size_t>(f.bits / 8) * static_cast<size_t>(features);
}
// Bytes of a token's codes and scales.
constexpr size_t stored_bytes(const KvFormat& f, int features) {
  const size_t scales = f.group > 0 ? sizeof(uint16_t) * scales_of(features) : 0;
  return code_bytes(f, features) + scales;
}

// The transform of n features: Sylvester's Hadamard matrix divided by the square root of its size,
// which is the largest power of two that divides n, in blocks along the vector. It is its own
// inverse.
constexpr int rotation_size(int n) {
  return n & -n;
}

// x is stored as x * to_code, rounded to nearest even and clamped to the range of the codes. It is
// read as that integer times the scale.
struct KvScale {
  uint16_t bits;  // F16
  float to_code;
};
// INT8: maps the largest magnitude, given by its bits, to about 127. An infinity is treated as a
// value beyond F16; a NaN makes the scale NaN.
KvScale int8_scale(uint32_t largest);
// INT4: maps the element with the largest magnitude to about -8, so that all sixteen codes are
// used; the scale has the opposite sign of that element. `least` and `most` are the minimum and the
// maximum of the group; if both have the same magnitude, the positive one counts. With 15 codes, -7
// to 7, the mean squared error of normally distributed values in groups of 32 is 0.0094 of their
// variance; with these 16 it is 0.0074. `sum` is the sum of the group: NaN if an element is.
KvScale int4_scale(float least, float most, float sum);

}  // namespace freshet::ops

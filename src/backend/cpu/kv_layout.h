// The layouts of a block of the cache, for reading single keys and moving single slots.
// attention_row.h, attention_tiles.inl and attention_coded.h write these layouts and describe them.
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <span>

#include "ops/attention.h"
#include "quant/fp8.h"
#include "tensor/dtype.h"

namespace freshet::cpu {
namespace {

// A head has its keys, [key_dim, 16], for INT8 the scales of keys and values, [features / 32, 16],
// and its values, [16, value_dim]. If values are prefixes of keys (MLA), keys are [16, key_dim].
class KvRows {
 public:
  explicit KvRows(const ops::KvShape& shape) : s_(shape) {}

  void read_keys(const uint8_t* block, int head, float* keys) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    for (int d = 0; d < s_.key_dim; ++d) {
      for (int t = 0; t < kSlots; ++t) {
        const int i = s_.value_is_key_prefix ? t * s_.key_dim + d : d * kSlots + t;
        float x = value(at, i);
        if (scaled()) x *= f16_to_f32(scales(at)[d / ops::kScaledFeatures * kSlots + t]);
        keys[d * kSlots + t] = x;
      }
    }
  }

  void read_features(const uint8_t* block, int head, std::span<const int32_t> features,
                     float* keys) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    for (const int32_t d : features) {
      values(at, d * kSlots, kSlots, keys);
      const uint16_t* const scale =
          scaled() ? scales(at) + d / ops::kScaledFeatures * kSlots : nullptr;
      for (int t = 0; scale != nullptr && t < kSlots; ++t) keys[t] *= f16_to_f32(scale[t]);
      keys += kSlots;
    }
  }

  void read_values(const uint8_t* block, int head, float* to) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    const auto first =
        static_cast<int>(s_.head_bytes() / ops::element_bytes(s_.type)) - kSlots * s_.value_dim;
    values(at, first, kSlots * s_.value_dim, to);
    if (!scaled()) return;
    const uint16_t* const scale = scales(at) + ops::scales_of(s_.key_dim) * kSlots;
    for (int t = 0; t < kSlots; ++t) {
      for (int d = 0; d < s_.value_dim; ++d)
        to[t * s_.value_dim + d] *= f16_to_f32(scale[d / ops::kScaledFeatures * kSlots + t]);
    }
  }

  void move(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int head) const {
    const size_t offset = static_cast<size_t>(head) * s_.head_bytes();
    from += offset;
    to += offset;
    const size_t element = ops::element_bytes(s_.type);
    const auto copy = [&](size_t at, size_t into, size_t n) {
      std::memcpy(to + into * element, from + at * element, n * element);
    };
    const auto key = static_cast<size_t>(s_.key_dim), value = static_cast<size_t>(s_.value_dim);
    const auto a = static_cast<size_t>(from_slot), b = static_cast<size_t>(to_slot);
    if (s_.value_is_key_prefix) {
      copy(a * key, b * key, key);
    } else {
      for (size_t d = 0; d < key; ++d) copy(d * kSlots + a, d * kSlots + b, 1);
      const size_t first = (s_.head_bytes() - element * kSlots * value) / element;
      copy(first + a * value, first + b * value, value);
    }
    if (!scaled()) return;
    const int groups =
        ops::scales_of(s_.key_dim) + (s_.value_is_key_prefix ? 0 : ops::scales_of(s_.value_dim));
    auto* const target = const_cast<uint16_t*>(scales(to));
    for (int g = 0; g < groups; ++g) {
      target[g * kSlots + to_slot] = scales(from)[g * kSlots + from_slot];
    }
  }

 private:
  static constexpr int kSlots = ops::kBlockTokens;

  bool scaled() const { return s_.type == ops::KvType::kInt8; }
  const uint16_t* scales(const uint8_t* head) const {
    return reinterpret_cast<const uint16_t*>(head + kSlots * s_.key_dim);
  }
  float value(const uint8_t* at, int i) const {
    const auto* const half = reinterpret_cast<const uint16_t*>(at);
    switch (s_.type) {
      case ops::KvType::kF32:
        return reinterpret_cast<const float*>(at)[i];
      case ops::KvType::kF16:
        return f16_to_f32(half[i]);
      case ops::KvType::kBF16:
        return bf16_to_f32(half[i]);
      case ops::KvType::kFP8:
        return quant::e4m3_to_f32(at[i]);
      case ops::KvType::kInt8:
      case ops::KvType::kInt4:  // 4-bit codes have another layout, and Ops refuses them
      case ops::KvType::kK8V4:
        break;
    }
    return static_cast<float>(static_cast<int8_t>(at[i]));
  }

  void values(const uint8_t* at, int first, int count, float* to) const {
    if (s_.type == ops::KvType::kF16) {  // in one loop, which compilers turn into vectors
      const auto* const half = reinterpret_cast<const uint16_t*>(at) + first;
      for (int i = 0; i < count; ++i) to[i] = f16_to_f32(half[i]);
      return;
    }
    for (int i = 0; i < count; ++i) to[i] = value(at, first + i);
  }

  const ops::KvShape& s_;
};

// Byte tiles (attention_tiles.inl).
class KvTiles {
 public:
  explicit KvTiles(const ops::KvShape& shape) : s_(shape) {}

  void read_keys(const uint8_t* block, int head, float* keys) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    for (int t = 0; t < kSlots; ++t) {
      const float step = unit(at, t);
      for (int d = 0; d < s_.key_dim; ++d) keys[d * kSlots + t] = key(at, d, t, step);
    }
  }

  void read_features(const uint8_t* block, int head, std::span<const int32_t> features,
                     float* keys) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    float steps[kSlots];
    units(at, steps);
    for (const int32_t d : features) {
      // Bytes of the same feature are four apart, in one line of each plane.
      const Line high = line_at(at + key_at(d & ~3, 0)),
                 low = line_at(at + key_at(d & ~3, 0) + kLow);
      const int up = 24 - d % 4 * 8;
      for (int t = 0; t < kSlots; ++t) {
        const int code = (static_cast<int32_t>(high[t] << up) >> 24) * 256 +
                         (static_cast<int32_t>(low[t] << up) >> 24);
        keys[t] = static_cast<float>(code) * steps[t];
      }
      keys += kSlots;
    }
  }

  void read_values(const uint8_t* block, int head, float* values) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    const uint8_t* const codes =
        at + s_.head_bytes() - 2 * kSlots * static_cast<size_t>(s_.value_dim);
    for (int t = 0; t < kSlots; ++t, values += s_.value_dim) {
      const float step = unit(at, t, 8);
      for (int d = 0; d < s_.value_dim; ++d) {
        const uint8_t* const code = codes + value_at(d, t);
        values[d] = static_cast<float>(static_cast<int8_t>(code[0]) * 256 +
                                       static_cast<int8_t>(code[256])) *
                    step;
      }
    }
  }

  void move(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int head) const {
    const size_t offset = static_cast<size_t>(head) * s_.head_bytes();
    from += offset;
    to += offset;
    for (int d = 0; d < s_.key_dim; d += 4) {
      for (const size_t plane : {size_t{0}, kLow}) {
        std::memcpy(to + key_at(d, to_slot) + plane, from + key_at(d, from_slot) + plane, 4);
      }
    }
    const size_t values = s_.head_bytes() - 2 * kSlots * static_cast<size_t>(s_.value_dim);
    for (int d = 0; d < s_.value_dim; ++d) {
      for (const size_t plane : {size_t{0}, size_t{256}}) {
        to[values + value_at(d, to_slot) + plane] = from[values + value_at(d, from_slot) + plane];
      }
    }
  }

 private:
  static constexpr int kSlots = ops::kBlockTokens;
  static constexpr size_t kLow = 1024;  // from the high bytes of a tile of keys to the low ones
  static constexpr int kNaN = 127;

  // What a slot's key is in units of: its power is in the last bits of the low bytes of features 0
  // to 7. With `first` 8: its value.
  static float unit(const uint8_t* at, int t, int first = 0) {
    int power = 0;
    for (int d = 0; d < 8; ++d) power |= (at[key_at(first + d, t) + kLow] & 1) << d;
    if (power == kNaN) return std::numeric_limits<float>::quiet_NaN();
    return std::bit_cast<float>(static_cast<uint32_t>(static_cast<int8_t>(power) + 127) << 23);
  }
  using Line = std::array<uint32_t, kSlots>;
  static Line line_at(const uint8_t* from) {
    Line line;
    std::memcpy(line.data(), from, sizeof line);
    return line;
  }
  // unit() of all slots, in loops that compilers turn into vectors.
  static void units(const uint8_t* at, float* to) {
    Line power{};
    for (int d = 0; d < 8; d += 4) {
      const Line low = line_at(at + key_at(d, 0) + kLow);
      for (int t = 0; t < kSlots; ++t) {
        const uint32_t bits = low[t] & 0x01010101;
        power[t] |= (bits | bits >> 7 | bits >> 14 | bits >> 21) % 16 << d;
      }
    }
    for (int t = 0; t < kSlots; ++t) {
      const uint32_t exponent = (power[t] ^ 0x80) - 1;  // of a signed byte, plus 127
      const uint32_t bits = power[t] == kNaN ? 0x7fc00000 : exponent << 23;
      to[t] = std::bit_cast<float>(bits);
    }
  }
  static float key(const uint8_t* at, int d, int t, float unit) {
    const size_t i = key_at(d, t);
    const int code = static_cast<int8_t>(at[i]) * 256 + static_cast<int8_t>(at[i + kLow]);
    return static_cast<float>(code) * unit;
  }
  static size_t key_at(int d, int slot) {
    return static_cast<size_t>(d / 64) * 2 * kLow +
           static_cast<size_t>(d % 64 / 4 * 64 + slot * 4 + d % 4);
  }
  static size_t value_at(int d, int slot) {
    return static_cast<size_t>(d / 16 * 16 * 32 + slot / 4 * 64 + d % 16 * 4 + slot % 4);
  }

  const ops::KvShape& s_;
};

// Caches with 4-bit codes (attention_coded.h). Rotated keys stay rotated.
class KvCodes {
 public:
  explicit KvCodes(const ops::KvShape& shape) : s_(shape) {}

  void read_keys(const uint8_t* block, int head, float* keys) const {
    const uint8_t* const at = block + static_cast<size_t>(head) * s_.head_bytes();
    const ops::KvFormat& format = ops::info(s_.type).key;
    const auto* const scales =
        reinterpret_cast<const uint16_t*>(at + kSlots * ops::code_bytes(format, s_.key_dim));
    const bool packed = format.code == ops::KvCode::kInt4;
    for (int d = 0; d < s_.key_dim; ++d) {
      for (int t = 0; t < kSlots; ++t) {
        const int word = (packed ? d / 8 : d / 4) * kSlots + t;
        const int byte = at[word * 4 + d % 4];
        const int code = packed ? (d % 8 < 4 ? byte & 15 : byte >> 4) - 8 : byte - 128;
        keys[d * kSlots + t] =
            static_cast<float>(code) * f16_to_f32(scales[d / ops::kScaledFeatures * kSlots + t]);
      }
    }
  }

  void move(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int head) const {
    const size_t offset = static_cast<size_t>(head) * s_.head_bytes();
    from += offset;
    to += offset;
    const auto copy = [&](size_t lines, size_t bytes) {  // of `bytes` of each slot
      for (size_t line = 0; line < lines; ++line, from += kSlots * bytes, to += kSlots * bytes) {
        std::memcpy(to + static_cast<size_t>(to_slot) * bytes,
                    from + static_cast<size_t>(from_slot) * bytes, bytes);
      }
    };
    const ops::KvTypeInfo& type = ops::info(s_.type);
    const size_t values = kSlots * ops::code_bytes(type.value, s_.value_dim);
    const uint8_t* const value_from = from + s_.head_bytes() - values;
    uint8_t* const value_to = to + s_.head_bytes() - values;
    copy(ops::code_bytes(type.key, s_.key_dim) / 4, 4);
    copy(static_cast<size_t>(ops::scales_of(s_.key_dim) + ops::scales_of(s_.value_dim)), 2);
    for (int group = 0; group < ops::scales_of(s_.value_dim); ++group) {
      for (int word = 0; word < 16; ++word)
        value_to[value_at(group, word, to_slot)] = value_from[value_at(group, word, from_slot)];
    }
  }

 private:
  static constexpr int kSlots = ops::kBlockTokens;

  static size_t value_at(int group, int word, int slot) {
    return static_cast<size_t>(((group * 4 + slot / 4) * 16 + word) * 4 + slot % 4);
  }

  const ops::KvShape& s_;
};

}  // namespace
}  // namespace freshet::cpu

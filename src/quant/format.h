// Storage formats of weights: how a row of numbers lies in a file and in memory.
//
// A row of K numbers is head_bytes (a scale of all of it; most formats have none) and then
// K / block_size blocks of block_bytes each; K must be a multiple of block_size. Plain types have a
// block of one and no head. The quantised formats are those of GGUF (ggml's block layouts,
// little-endian), FP8, INT8 and INT4 groups. decode() is the definition of what a row means: every
// kernel is tested against it. All functions are pure and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace freshet::quant {

enum class Format : uint8_t {
  kF32,
  kF16,
  kBF16,
  kFP8,
  kINT8,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4,
  kInt4G128,
  kInt4G32,
};

inline constexpr uint32_t kNoGgmlType = ~uint32_t{0};

struct FormatInfo {
  Format format;
  std::string_view name;  // "q4_k", lower case
  int block_size;         // numbers a block
  int block_bytes;
  int head_bytes;
  uint32_t ggml_type;  // the type's number in a GGUF file, or kNoGgmlType
  // Numbers [first, first + n) of a row, both multiples of block_size. Bit-exact with the format's
  // definition.
  void (*decode_part)(const void* row, int64_t first, float* out, int64_t n);
  // A row of n numbers. nullptr where we do not write the format. `importance`: nullptr or n
  // weights of the squared error.
  void (*encode)(const float* in, void* row, int64_t n, const float* importance);

  // The first n numbers of a row; without a head, of any blocks.
  void decode(const void* row, float* out, int64_t n) const { decode_part(row, 0, out, n); }
  bool plain() const { return block_size == 1 && head_bytes == 0; }
};

const FormatInfo& info(Format f);
std::span<const FormatInfo> all_formats();
std::optional<Format> format_by_name(std::string_view name);  // any case
std::optional<Format> format_by_ggml_type(uint32_t type);

inline size_t row_bytes(Format f, int64_t k) {
  const FormatInfo& i = info(f);
  return static_cast<size_t>(i.head_bytes) +
         static_cast<size_t>(k / i.block_size) * static_cast<size_t>(i.block_bytes);
}

}  // namespace freshet::quant

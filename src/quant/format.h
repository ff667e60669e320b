// Storage formats of weights: the layout of a row of values in a file and in memory.
//
// A row of K values is head_bytes (one scale for the row; most formats have none), followed by K /
// block_size blocks of block_bytes each; K must be a multiple of block_size. Plain types have a
// block size of one and no head. The quantised formats are those of GGUF (ggml's block layouts,
// little-endian), FP8, INT8, groups of integers, MXFP8, NVFP4, NF4 and FP4. decode() defines the
// values of a row: every kernel is tested against it. All functions are pure and thread-safe.
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
  // Published in safetensors files only.
  kMXFP8,
  kFP8G32,
  kNF4,
  kFP4,
  kNVFP4,
  kInt2G128,
  kInt2G32,
  kInt3G128,
  kInt3G32,
  kInt8G128,
  kInt8G32,
  kIQ1_S,
  kIQ1_M,
  kIQ2_XXS,
  kIQ2_XS,
  kIQ2_S,
  kIQ3_XXS,
  kIQ3_S,
  kTQ1_0,
  kTQ2_0,
};

inline constexpr uint32_t kNoGgmlType = ~uint32_t{0};

struct FormatInfo {
  Format format;
  std::string_view name;  // "q4_k", lower case
  int block_size;         // values per block
  int block_bytes;
  int head_bytes;
  uint32_t ggml_type;  // the type's number in a GGUF file, or kNoGgmlType
  // Decodes values [first, first + n) of a row, both multiples of block_size. Bit-exact with the
  // format's definition.
  void (*decode_part)(const void* row, int64_t first, float* out, int64_t n);
  // Encodes a row of n values; nullptr for formats that we do not write. `importance`: nullptr or n
  // weights of the squared error.
  void (*encode)(const float* in, void* row, int64_t n, const float* importance);

  // Decodes the first n values of a row; in formats without a head, of any blocks.
  void decode(const void* row, float* out, int64_t n) const { decode_part(row, 0, out, n); }
  bool plain() const { return block_size == 1 && head_bytes == 0; }
};

const FormatInfo& info(Format f);
std::span<const FormatInfo> all_formats();
std::optional<Format> format_by_name(std::string_view name);  // ignores case
std::optional<Format> format_by_ggml_type(uint32_t type);

inline size_t row_bytes(Format f, int64_t k) {
  const FormatInfo& i = info(f);
  return static_cast<size_t>(i.head_bytes) +
         static_cast<size_t>(k / i.block_size) * static_cast<size_t>(i.block_bytes);
}

}  // namespace freshet::quant

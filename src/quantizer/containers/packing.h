// What the containers share: checks of matrices, bit packing, and bytes of tensors. Pure;
// thread-safe.
#pragma once

#include <bit>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "quantizer/containers/container.h"

namespace freshet::quantizer {

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Columns that share a scale; the whole row for a group of 0.
inline int64_t group_columns(const CodedMatrix& m, const Scheme& s) {
  return s.group > 0 ? s.group : m.cols;
}
inline int64_t column_groups(const CodedMatrix& m, const Scheme& s) {
  return ceil_div(m.cols, group_columns(m, s));
}
inline int64_t row_groups(const CodedMatrix& m, const Scheme& s) {
  return s.group_rows > 0 ? ceil_div(m.rows, s.group_rows) : 1;
}

// Whether the matrix is one of the scheme: sizes, codes in range, finite scales, whole groups of
// columns (blocks of rows and columns may end early), a static input scale if the scheme needs one.
Status check_matrix(const std::string& stem, const CodedMatrix& matrix, const Scheme& scheme);

// Words of 32 bits that hold values[0, n) one after the other, the lowest bits first; values may
// lie across two words.
inline void pack_bits(const uint8_t* values, int64_t n, int bits, uint32_t* words) {
  uint64_t held = 0;
  int filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    held |= uint64_t{values[i]} << filled;
    filled += bits;
    if (filled < 32) continue;
    *words++ = static_cast<uint32_t>(held);
    held >>= 32;
    filled -= 32;
  }
  if (filled > 0) *words = static_cast<uint32_t>(held);
}

template <class T>
std::vector<uint8_t> bytes_of(std::span<const T> values) {
  static_assert(std::endian::native == std::endian::little);
  std::vector<uint8_t> bytes(values.size_bytes());
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
template <class T>
std::vector<uint8_t> bytes_of(const std::vector<T>& values) {
  return bytes_of(std::span<const T>(values));
}

StoredTensor i32_tensor(std::string name, std::vector<int64_t> shape,
                        const std::vector<uint32_t>& words);
StoredTensor f32_tensor(std::string name, std::vector<int64_t> shape,
                        std::span<const float> values);

// Scales in the scheme's type. One that the type does not hold exactly is an error: the caller
// evaluated something else.
Result<StoredTensor> scale_tensor(std::string name, std::vector<int64_t> shape,
                                  std::span<const float> values, ScaleType type);

// The same for all scales of a matrix, transposed: [groups, rows].
Result<StoredTensor> turned_scales(std::string name, const CodedMatrix& m, const Scheme& s);

// Two codes of 4 bits per byte, the even column in the low half: [rows, cols / 2].
StoredTensor nibble_tensor(std::string name, const CodedMatrix& matrix);

// The codes as bytes: F8_E4M3, or I8 of integers with their offset taken away.
StoredTensor byte_tensor(std::string name, const CodedMatrix& matrix, const Scheme& scheme);

// A divisor d with 1 / d == factor in F32, or the nearest reciprocal if there is none.
float divisor_for(float factor);

// The one scheme of a request; an error that names the container if there are several.
Result<Scheme> only_scheme(const ConfigRequest& request, std::string_view container);

// The first layer whose rows are no multiple of `rows` or columns none of `cols`; "" if there is
// none. For notes: "model.layers.0.mlp.down_proj [768, 2000]".
std::string layer_off(const ModelFacts& facts, int64_t rows, int64_t cols);

// The names of a request's `ignore` as JSON.
json::Array ignored_names(const ConfigRequest& request);

// No further files; a scheme as it is; nothing to settle. For rows of containers.
std::vector<std::pair<std::string, json::Value>> no_side_files(const json::Value&);
Scheme as_it_is(Scheme scheme, std::string_view dtype);
Status nothing_to_settle(CodedMatrix&, const Scheme&);

}  // namespace freshet::quantizer

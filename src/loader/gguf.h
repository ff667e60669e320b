// Reader of one GGUF file (versions 2 and 3, little-endian), memory-mapped.
//
// GGUF: magic "GGUF", u32 version, u64 tensor count, u64 metadata count, the metadata (key, type,
// value), the tensor table (name, dimensions innermost first, type, offset) and, aligned to
// general.alignment, the data. Everything is verified when the file is opened; afterwards every
// view points inside the mapping. Strings and raw arrays are views into the file. Immutable after
// opening, so safe to read from many threads. Moving keeps all views valid.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mapped_file.h"
#include "base/status.h"
#include "loader/tensor_source.h"

namespace freshet::loader {

enum class GgufType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

std::string_view name_of(GgufType t);
// Bytes of one fixed-size value; 0 for strings and arrays.
size_t size_of(GgufType t);

// A metadata value: a scalar, or an array of scalars (nested arrays are refused).
struct GgufValue {
  GgufType type = GgufType::kU8;  // type of the elements; never kArray
  bool is_array = false;
  uint64_t count = 1;
  std::span<const uint8_t> raw;           // count fixed-size values, unaligned; empty for strings
  std::vector<std::string_view> strings;  // count strings if type is kString

  // Element i, read leniently: any integer width or bool; a float only if it is integral.
  std::optional<int64_t> int_at(uint64_t i) const;
  std::optional<double> number_at(uint64_t i) const;  // any number or bool
};

class GgufFile {
 public:
  static Result<GgufFile> open(const std::string& path);
  // The same for bytes that outlive the result; `name` is used in errors.
  static Result<GgufFile> parse(std::span<const uint8_t> bytes, const std::string& name);

  uint32_t version() const { return version_; }
  uint64_t alignment() const { return alignment_; }
  const std::vector<std::pair<std::string_view, GgufValue>>& metadata() const { return metadata_; }
  const GgufValue* find(std::string_view key) const;  // nullptr if absent

  // nullopt: absent, of another kind, or out of range. Any integer width is accepted because
  // writers differ.
  std::optional<int64_t> get_int(std::string_view key) const;
  std::optional<uint32_t> get_u32(std::string_view key) const;
  std::optional<float> get_f32(std::string_view key) const;  // accepts an integer
  std::optional<bool> get_bool(std::string_view key) const;  // accepts an integer
  std::optional<std::string_view> get_string(std::string_view key) const;
  std::optional<std::vector<int64_t>> get_ints(
      std::string_view key) const;  // a scalar counts as one element
  std::optional<std::vector<float>> get_floats(std::string_view key) const;
  const std::vector<std::string_view>* get_strings(std::string_view key) const;

  // In the order of the tensor table.
  const std::vector<TensorSource>& tensors() const { return tensors_; }
  const TensorSource* find_tensor(std::string_view name) const;  // nullptr if absent
  const MappedFile* file() const { return file_.get(); }

 private:
  class Parser;

  uint32_t version_ = 0;
  uint64_t alignment_ = 32;
  std::unique_ptr<MappedFile> file_;  // TensorSources point to it
  std::vector<std::pair<std::string_view, GgufValue>> metadata_;
  std::unordered_map<std::string_view, size_t> keys_;
  std::vector<TensorSource> tensors_;
  std::unordered_map<std::string_view, size_t> index_;
};

}  // namespace freshet::loader

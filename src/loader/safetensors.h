// Reader of one .safetensors file, memory-mapped.
//
// Layout: u64 header length (little-endian), a JSON object {name: {dtype, shape, data_offsets}} and
// then the data, which the tensors cover without gaps or overlaps. Everything is verified when the
// file is opened; afterwards every TensorSource points inside the mapping and its size fits its
// shape. Types that cannot be decoded (F8_E4M3, I64 ...) are listed without a format. Immutable
// after opening, so safe to read from many threads.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/mapped_file.h"
#include "base/status.h"
#include "loader/tensor_source.h"

namespace freshet::loader {

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  // The same for bytes that outlive the result; `name` is used in errors.
  static Result<SafetensorsFile> parse(std::span<const uint8_t> bytes, const std::string& name);

  // In the order of the header.
  const std::vector<TensorSource>& tensors() const { return tensors_; }
  const TensorSource* find(std::string_view name) const;  // nullptr if absent
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const MappedFile* file() const { return file_.get(); }

 private:
  Status read(std::span<const uint8_t> bytes);

  std::unique_ptr<MappedFile> file_;  // TensorSources point to it
  std::vector<TensorSource> tensors_;
  std::unordered_map<std::string_view, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace freshet::loader

#include "cli/model_inputs.h"

#include <cstring>

#include "loader/safetensors.h"

namespace freshet::cli {
namespace {

template <class T>
int64_t whole_at(const uint8_t* data, int64_t i) {
  T value;
  std::memcpy(&value, data + static_cast<size_t>(i) * sizeof(T), sizeof(T));
  return int64_t{value};
}

Result<std::vector<int32_t>> whole_numbers(const loader::TensorSource& t) {
  if ((t.dtype != "I64" && t.dtype != "I32") || t.shape.size() != 1)
    return invalid_argument("tensor '{}' must be a list of whole numbers (I64 or I32)", t.name);
  std::vector<int32_t> out;
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    const int64_t v =
        t.dtype == "I64" ? whole_at<int64_t>(t.data, i) : whole_at<int32_t>(t.data, i);
    if (v < 0 || v > INT32_MAX)
      return invalid_argument("tensor '{}': {} is not a token id", t.name, v);
    out.push_back(static_cast<int32_t>(v));
  }
  return out;
}

}  // namespace

Result<std::vector<ModelInput>> read_model_inputs(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const auto file, loader::SafetensorsFile::open(path));
  std::vector<ModelInput> inputs;
  while (const loader::TensorSource* ids = file.find(fmt::format("ids_{}", inputs.size()))) {
    ModelInput input;
    auto read = whole_numbers(*ids);
    if (!read.ok()) return read.status().with_context(path);
    input.ids = std::move(*read);
    if (input.ids.empty()) return invalid_argument("{}: tensor '{}' is empty", path, ids->name);
    if (const auto* types = file.find(fmt::format("token_type_ids_{}", inputs.size()))) {
      read = whole_numbers(*types);
      if (!read.ok()) return read.status().with_context(path);
      input.token_type_ids = std::move(*read);
      if (input.token_type_ids.size() != input.ids.size()) {
        return invalid_argument("{}: '{}' has {} numbers for {} ids", path, types->name,
                                input.token_type_ids.size(), input.ids.size());
      }
    }
    inputs.push_back(std::move(input));
  }
  if (inputs.empty()) return invalid_argument("{}: there is no tensor 'ids_0'", path);
  return inputs;
}

}  // namespace freshet::cli

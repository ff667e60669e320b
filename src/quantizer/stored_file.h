// Writing tensors as one safetensors file, in their order. The file is there whole or not at all;
// errors name it. Thread-safe for different paths.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/containers/container.h"

namespace freshet::quantizer {

// `metadata`: strings, for the header's "__metadata__".
Status write_tensors(const std::string& path, std::span<const StoredTensor> tensors,
                     json::Object metadata);

template <class T>
StoredTensor stored_array(std::string name, const char* dtype, std::vector<int64_t> shape,
                          const std::vector<T>& values) {
  StoredTensor t{std::move(name), dtype, std::move(shape), {}};
  t.bytes.resize(values.size() * sizeof(T));
  std::memcpy(t.bytes.data(), values.data(), t.bytes.size());
  return t;
}

}  // namespace freshet::quantizer

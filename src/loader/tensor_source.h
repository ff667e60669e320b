// One tensor as stored in a file; models and converters read weights from it.
//
// A view: `data` and `file` belong to the reader that listed the tensor (SafetensorsFile, GgufFile
// or Checkpoint) and live as long as the reader; moving the reader keeps them valid. Plain data,
// safe to read from many threads. `data` may have any alignment: read it with memcpy or through
// quant decoders, never through a cast pointer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/mapped_file.h"
#include "base/status.h"
#include "quant/format.h"

namespace freshet::loader {

struct TensorSource {
  std::string name;
  std::optional<quant::Format> format;  // absent: a type that cannot be decoded
  std::string dtype;                    // the type's name in the file: "BF16", "F8_E4M3", "Q4_K"
  std::vector<int64_t> shape;           // outermost first, as in PyTorch: [rows, cols]
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  const MappedFile* file = nullptr;  // nullptr if the reader was given memory
  size_t file_offset = 0;

  int64_t elements() const;
  // The format, or an error that names the tensor and its type.
  Result<quant::Format> usable_format() const;
};

// The product of the dimensions; nullopt if one is negative or the product exceeds int64.
std::optional<int64_t> checked_product(const std::vector<int64_t>& shape);

}  // namespace freshet::loader

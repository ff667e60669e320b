// One tensor as it lies in a file: what models and converters read weights from.
//
// A view: `data` and `file` belong to the reader that listed it (SafetensorsFile, GgufFile or
// Checkpoint) and live as long as it does; moving the reader keeps them valid. Plain data, safe to
// read from many threads. `data` has the alignment of the file (any): read it with memcpy or
// through quant decoders, never through a cast pointer.
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
  std::optional<quant::Format> format;  // absent: a type that nothing here can decode
  std::string dtype;                    // the type as the file calls it: "BF16", "F8_E4M3", "Q4_K"
  std::vector<int64_t> shape;           // outermost first, as in PyTorch: [rows, cols]
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  const MappedFile* file = nullptr;  // nullptr when the reader was given memory
  size_t file_offset = 0;

  int64_t elements() const;
  // The format, or the error that names the tensor and its type.
  Result<quant::Format> usable_format() const;
};

// shape's product, or nullopt when a dimension is negative or the product exceeds int64.
std::optional<int64_t> checked_product(const std::vector<int64_t>& shape);

}  // namespace freshet::loader

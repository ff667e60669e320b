// Writing tensors as one safetensors file, in their order. The file is there whole or not at all;
// errors name it. Thread-safe for different paths.
#pragma once

#include <span>
#include <string>

#include "base/json.h"
#include "base/status.h"
#include "quantizer/containers/container.h"

namespace freshet::quantizer {

// `metadata`: strings, for the header's "__metadata__".
Status write_tensors(const std::string& path, std::span<const StoredTensor> tensors,
                     json::Object metadata);

}  // namespace freshet::quantizer

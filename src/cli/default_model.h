// The embedded model: models/default.gguf, linked into the program unchanged.
//
// Read-only, thread-safe. Empty in builds without the file.
#pragma once

#include <cstdint>
#include <span>

namespace freshet::cli {

std::span<const uint8_t> default_model();

}  // namespace freshet::cli

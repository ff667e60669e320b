// The model that the program carries with it: models/default.gguf, linked in as it is.
//
// Read-only, shared by all threads. Empty in builds without the file.
#pragma once

#include <cstdint>
#include <span>

namespace freshet::cli {

std::span<const uint8_t> default_model();

}  // namespace freshet::cli

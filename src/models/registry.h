// The list of architectures, and reading a specification from a bare configuration.
#pragma once

#include <span>

#include "models/architecture.h"

namespace freshet::models {

std::span<const Architecture> architectures();

// An error names a type that is not in the list.
Result<const Architecture*> find_architecture(const json::Value& config);
// config: config.json's contents, or what gguf_config() makes.
Result<ModelSpec> read_spec(const json::Value& config);

}  // namespace freshet::models

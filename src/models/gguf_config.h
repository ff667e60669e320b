// GGUF metadata as a configuration: the same keys as config.json, so that an architecture is read
// by one function whatever the container.
//
// What GGUF leaves to the reader (biases, tied embeddings, normalised queries) shows in which
// tensors are there. The names are llama.cpp's.
#pragma once

#include "base/json.h"
#include "base/status.h"
#include "loader/checkpoint.h"

namespace freshet::models {

// An object with `model_type`. Errors: no general.architecture; a size that differs by layer.
Result<json::Value> gguf_config(const loader::Checkpoint& checkpoint);

}  // namespace freshet::models

// GGUF metadata as a configuration: the same keys as config.json, so that an architecture is read
// by one function whatever the container.
//
// GGUF does not state everything (biases, tied embeddings, normalised queries): the tensors that
// the file has tell the rest. The names are llama.cpp's.
#pragma once

#include "base/json.h"
#include "base/status.h"
#include "loader/checkpoint.h"

namespace freshet::models {

// An object with `model_type`. Errors: no general.architecture; a size that differs by layer.
Result<json::Value> gguf_config(const loader::Checkpoint& checkpoint);

}  // namespace freshet::models

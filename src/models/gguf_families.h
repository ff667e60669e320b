// The families of models in GGUF files: the model type that a file's general.architecture stands
// for, and what llama.cpp knows of an architecture without a key in the file. Pure; thread-safe.
#pragma once

#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "loader/checkpoint.h"

namespace freshet::models {

// Completes a configuration whose keys that files of all families share have been read. Errors: a
// form of a family that is not supported.
Status complete_family(const loader::Checkpoint& checkpoint, std::string_view architecture,
                       json::Object& config);

}  // namespace freshet::models

// Models whose layers keep states in GGUF files: which layers they are, and their sizes. Pure;
// thread-safe.
#pragma once

#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "loader/checkpoint.h"

namespace freshet::models {

// Completes the configuration of a model with states; nothing, if the architecture has none. The
// result is the model type, if the file's metadata decide it, or empty. Errors: layers without
// attention in other architectures; what the file needs and does not say; metadata that our form of
// the model does not honour.
Result<std::string_view> complete_states(const loader::Checkpoint& checkpoint,
                                         std::string_view architecture, json::Object& config);

}  // namespace freshet::models

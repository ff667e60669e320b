// Finds the file or folder of the model that the user named.
//
// Thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::cli {

// `name` is a path, or the name of a model in the cache folder; "" (or "default") is the embedded
// model. The error says where it looked and how to get a model.
Result<std::string> resolve_model(const std::string& name);

// Whether `text` means a model rather than a prompt: it names a model that exists or can be
// downloaded, or it looks like a path.
bool looks_like_model(const std::string& text);

}  // namespace freshet::cli

// From what a user calls a model to the file or folder that holds it.
//
// Thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::cli {

// `name` is a path, or the name of a model in the cache folder; "" (or "default") is the embedded
// model. The error tells what was looked for and how to get a model.
Result<std::string> resolve_model(const std::string& name);

// Whether `text` was meant as a model rather than as a prompt: it is one that can be found, or
// looks like a path.
bool looks_like_model(const std::string& text);

}  // namespace freshet::cli

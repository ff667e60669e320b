// What --version prints: version, commit, compiler, instruction sets, CUDA plug-in.
//
// Thread-safe.
#pragma once

#include <string>

namespace freshet::cli {

// Several lines; the first is "freshet 0.1.0".
std::string version_text();

}  // namespace freshet::cli

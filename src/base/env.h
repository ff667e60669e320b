// Environment variables: the whole list of those that are read, and the only reader of them.
// Safe from many threads as long as nothing changes the environment meanwhile.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet {

enum class EnvVar { kCacheDir, kXdgCacheHome, kHome, kApiKey, kOpenAiKey, kNoColor };

struct EnvEntry {
  EnvVar var;
  const char* name;
  std::string_view meaning;  // for --help
};

std::span<const EnvEntry> env_table();

// nullopt when unset or empty.
std::optional<std::string> env(EnvVar var);

// Where measurements and other things that can be made again are kept; it may not exist yet.
Result<std::string> cache_dir();

}  // namespace freshet

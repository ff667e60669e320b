// Environment variables: the complete list, and the only code that reads them. Thread-safe as long
// as nothing changes the environment meanwhile.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet {

enum class EnvVar {
  kCacheDir,
  kXdgCacheHome,
  kHome,
  kApiKey,
  kOpenAiKey,
  kNoColor,
  kTerm,
  kHfHome,
  kHfHubCache,
  kHfEndpoint,
  kHfToken,
  kHfTokenPath,
  kHfOffline,
  kHfTimeout,
  kHttpsProxy,
  kHttpProxy,
  kNoProxy,
};

struct EnvEntry {
  EnvVar var;
  const char* name;
  std::string_view meaning;     // for --help
  const char* other = nullptr;  // another name of the same variable, read if `name` is unset
};

std::span<const EnvEntry> env_table();

// nullopt if unset or empty.
std::optional<std::string> env(EnvVar var);

// The directory for measurements and other data that can be recreated; it may not exist yet.
Result<std::string> cache_dir();

}  // namespace freshet

#include "base/env.h"

#include <cstdlib>
#include <iterator>

namespace freshet {
namespace {

// In the order of EnvVar.
constexpr EnvEntry kTable[] = {
    {EnvVar::kCacheDir, "FRESHET_CACHE_DIR",
     "folder for models (below models/) and cached measurements"},
    {EnvVar::kXdgCacheHome, "XDG_CACHE_HOME",
     "parent of the cache folder, if FRESHET_CACHE_DIR is unset"},
    {EnvVar::kHome, "HOME", "home folder, whose .cache is used if neither of the above is set"},
    {EnvVar::kApiKey, "FRESHET_API_KEY", "key that clients of the server must send"},
    {EnvVar::kOpenAiKey, "OPENAI_API_KEY", "key that bench serve sends"},
    {EnvVar::kNoColor, "NO_COLOR", "turns colours off in the terminal"},
    {EnvVar::kTerm, "TERM", "the kind of terminal; dumb: no colours, plain line input"},
    {EnvVar::kHfHome, "HF_HOME", "the model hub's folder (default: ~/.cache/huggingface)"},
    {EnvVar::kHfHubCache, "HF_HUB_CACHE", "folder of models from the hub (default: $HF_HOME/hub)",
     "HUGGINGFACE_HUB_CACHE"},
    {EnvVar::kHfEndpoint, "HF_ENDPOINT", "a mirror of the hub (default: https://huggingface.co)"},
    {EnvVar::kHfToken, "HF_TOKEN", "the hub's access token, for gated and private models"},
    {EnvVar::kHfTokenPath, "HF_TOKEN_PATH", "file with the token (default: $HF_HOME/token)"},
    {EnvVar::kHfOffline, "HF_HUB_OFFLINE", "1: use downloaded models only, never the network"},
    {EnvVar::kHfTimeout, "HF_HUB_DOWNLOAD_TIMEOUT", "seconds without a byte until a retry"},
    {EnvVar::kHttpsProxy, "HTTPS_PROXY", "proxy for https, e.g. http://proxy:3128", "https_proxy"},
    {EnvVar::kHttpProxy, "http_proxy", "proxy for http"},
    {EnvVar::kNoProxy, "NO_PROXY", "hosts that need no proxy, separated by commas", "no_proxy"},
};

// env() finds the entry by its index.
constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kTable); ++i)
    if (static_cast<size_t>(kTable[i].var) != i) return false;
  return true;
}
static_assert(in_order());

}  // namespace

std::span<const EnvEntry> env_table() {
  return kTable;
}

std::optional<std::string> env(EnvVar var) {
  const EnvEntry& entry = kTable[static_cast<size_t>(var)];
  const char* value = std::getenv(entry.name);
  if ((value == nullptr || *value == '\0') && entry.other != nullptr)
    value = std::getenv(entry.other);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

Result<std::string> cache_dir() {
  if (auto dir = env(EnvVar::kCacheDir)) return *dir;
  // The XDG specification requires relative paths to be ignored.
  if (auto dir = env(EnvVar::kXdgCacheHome); dir && dir->front() == '/') return *dir + "/freshet";
  if (auto home = env(EnvVar::kHome)) return *home + "/.cache/freshet";
  return not_found("no cache folder: set FRESHET_CACHE_DIR or HOME");
}

}  // namespace freshet

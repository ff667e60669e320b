#include "cli/model_path.h"

#include <array>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#include "base/env.h"
#include "cli/default_model.h"

namespace freshet::cli {
namespace {

namespace fs = std::filesystem;

// Models that tools/get_model can download.
constexpr std::array<std::string_view, 2> kPublished = {"smollm2", "gemma3"};

bool exists(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

bool is_published(std::string_view name) {
  for (const std::string_view p : kPublished) {
    if (p == name) return true;
  }
  return false;
}

// The path of the model `name` in the cache folder; "" if it is not there.
std::string in_cache(const std::string& name) {
  const auto folder = cache_dir();
  if (!folder.ok() || name.empty() || name.find('/') != std::string::npos) return {};
  for (const std::string& path :
       {*folder + "/models/" + name, *folder + "/models/" + name + ".gguf"}) {
    if (exists(path)) return path;
  }
  return {};
}

// Copies the embedded model to a file in memory, because readers take paths. Done once per process.
Result<std::string> default_path() {
  static std::mutex mutex;
  static std::string path;
  const std::lock_guard lock(mutex);
  if (!path.empty()) return path;
  const std::span<const uint8_t> bytes = default_model();
  if (bytes.empty())
    return not_found("this build has no embedded model: name one (tools/get_model smollm2)");
  const int fd = ::memfd_create("default.gguf", MFD_CLOEXEC);
  if (fd < 0)
    return io_error("cannot create a file in memory: {}", std::generic_category().message(errno));
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n <= 0) {
      ::close(fd);
      return io_error("cannot unpack the embedded model: {}",
                      std::generic_category().message(errno));
    }
    done += static_cast<size_t>(n);
  }
  path = fmt::format("/proc/self/fd/{}", fd);
  return path;
}

bool is_default(const std::string& name) {
  return name.empty() || name == "default";
}

}  // namespace

bool has_default_model() {
  return !default_model().empty();
}

bool looks_like_model(const std::string& text) {
  if (text.empty() || text.find_first_of(" \n") != std::string::npos) return exists(text);
  return text == "default" || is_published(text) || exists(text) || text.ends_with(".gguf") ||
         text.ends_with(".safetensors") || text.starts_with("/") || text.starts_with("./") ||
         text.starts_with("../") || !in_cache(text).empty();
}

Result<std::string> resolve_model(const std::string& name) {
  if (exists(name)) return name;
  if (is_default(name)) return default_path();
  if (const std::string path = in_cache(name); !path.empty()) return path;
  if (is_published(name)) {
    return not_found("{} is not in the cache folder yet: get it with tools/get_model {}", name,
                     name);
  }
  return not_found(
      "no model '{}': it is neither a file, nor a folder, nor a name in the cache folder "
      "(tools/get_model --list shows the available models)",
      name);
}

}  // namespace freshet::cli

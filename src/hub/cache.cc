#include "hub/cache.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/whole_file.h"

namespace freshet::hub {
namespace {

namespace fs = std::filesystem;

// Other programs note these, too, as missing.
constexpr std::array kTokenizerFiles = {"tokenizer.json", "tokenizer_config.json"};

Status cannot_create(const std::string& path, const std::error_code& error) {
  return io_error("cannot create {}: {}", path, error.message());
}

std::string temporary_name(const std::string& path) {
  return fmt::format("{}.{}.tmp", path, ::getpid());
}

// The names in a folder, sorted; none if it cannot be read.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    names.push_back(it->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

int64_t size_of_folder(const std::string& folder) {
  int64_t sum = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored) && !it->is_symlink(ignored))
      sum += static_cast<int64_t>(it->file_size(ignored));
  }
  return sum;
}

// The commits with a snapshot, that of refs/main last.
std::vector<std::string> commits_of(const Cache& cache, const std::string& repo,
                                    const std::optional<std::string>& newest) {
  std::vector<std::string> commits;
  for (const std::string& name : names_in(cache.repo_dir(repo) + "/snapshots")) {
    if (is_commit(name) && name != newest) commits.push_back(name);
  }
  if (newest) commits.push_back(*newest);
  return commits;
}

CachedModel make_model(const Cache& cache, ModelRef ref, const std::string& commit,
                       Selection selection) {
  CachedModel model{.ref = std::move(ref), .path = {}, .commit = commit, .selection = {}};
  model.path = cache.snapshot_dir(model.ref.repo, commit);
  if (selection.gguf) model.path += "/" + selection.main;
  model.selection = std::move(selection);
  return model;
}

}  // namespace

std::string Cache::blob_path(const std::string& repo, const std::string& blob) const {
  return repo_dir(repo) + "/blobs/" + blob;
}

std::string Cache::snapshot_dir(const std::string& repo, const std::string& commit) const {
  return repo_dir(repo) + "/snapshots/" + commit;
}

Status Cache::prepare(const std::string& repo) const {
  for (const char* part : {"/blobs", "/refs", "/snapshots"}) {
    std::error_code error;
    fs::create_directories(repo_dir(repo) + part, error);
    if (error) return cannot_create(repo_dir(repo) + part, error);
  }
  return {};
}

Status Cache::link(const std::string& repo, const std::string& commit, const std::string& path,
                   const std::string& blob) const {
  const std::string pointer = snapshot_dir(repo, commit) + "/" + path;
  std::error_code error;
  fs::create_directories(fs::path(pointer).parent_path(), error);
  if (error) return cannot_create(pointer, error);
  std::string target = "../../blobs/" + blob;
  for (const char c : path) {
    if (c == '/') target.insert(0, "../");
  }
  if (fs::read_symlink(pointer, error) == target) return {};
  const std::string temporary = temporary_name(pointer);
  fs::remove(temporary, error);
  fs::create_symlink(target, temporary, error);
  if (!error) fs::rename(temporary, pointer, error);
  return error ? cannot_create(pointer, error) : Status();
}

Status Cache::write_ref(const std::string& repo, const std::string& revision,
                        const std::string& commit) const {
  if (is_commit(revision)) return {};
  const std::string path = repo_dir(repo) + "/refs/" + revision;
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  if (error) return cannot_create(path, error);
  return write_whole_file(path, commit);
}

Status Cache::note_no_tokenizer(const std::string& repo, const std::string& commit) const {
  const std::string folder = repo_dir(repo) + "/.no_exist/" + commit;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return cannot_create(folder, error);
  for (const char* name : kTokenizerFiles)
    FRESHET_RETURN_IF_ERROR(write_whole_file(fmt::format("{}/{}", folder, name), ""));
  return {};
}

bool Cache::is_complete(const std::string& repo, const std::string& commit,
                        const Selection& selection) const {
  if (!has_all_parts(selection)) return false;
  if (has_tokenizer(selection)) return true;
  std::error_code error;
  return std::all_of(kTokenizerFiles.begin(), kTokenizerFiles.end(), [&](const char* name) {
    return fs::exists(fmt::format("{}/.no_exist/{}/{}", repo_dir(repo), commit, name), error);
  });
}

std::optional<std::string> Cache::commit_of(const std::string& repo,
                                            const std::string& revision) const {
  if (is_commit(revision)) return revision;
  std::ifstream file(repo_dir(repo) + "/refs/" + revision);
  std::string commit;
  if (!file || !std::getline(file, commit)) return std::nullopt;
  while (!commit.empty() && (commit.back() == '\r' || commit.back() == ' ')) commit.pop_back();
  return is_commit(commit) ? std::optional(commit) : std::nullopt;
}

std::vector<RepoFile> Cache::files(const std::string& repo, const std::string& commit) const {
  const fs::path folder = snapshot_dir(repo, commit);
  std::vector<RepoFile> found;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code missing;
    if (!fs::is_regular_file(it->path(), missing) || missing) continue;
    RepoFile f;
    f.path = it->path().lexically_relative(folder).string();
    f.size = static_cast<int64_t>(fs::file_size(it->path(), missing));
    f.blob = fs::read_symlink(it->path(), missing).filename().string();
    if (check_file_path(f.path).ok()) found.push_back(std::move(f));
  }
  std::sort(found.begin(), found.end(),
            [](const RepoFile& a, const RepoFile& b) { return a.path < b.path; });
  return found;
}

std::optional<CachedModel> Cache::locate(const ModelRef& ref) const {
  const auto commit = commit_of(ref.repo, ref.revision);
  if (!commit) return std::nullopt;
  auto selection = select_files(files(ref.repo, *commit), ref.quant, ref.repo);
  if (!selection.ok() || !is_complete(ref.repo, *commit, *selection)) return std::nullopt;
  return make_model(*this, ref, *commit, std::move(selection).value());
}

std::vector<CachedModel> Cache::list() const {
  std::vector<CachedModel> models;
  for (const std::string& folder : names_in(root_)) {
    const std::string repo = repo_of_folder(folder);
    if (repo.empty()) continue;
    const auto newest = commit_of(repo, "main");
    for (const std::string& commit : commits_of(*this, repo, newest)) {
      ModelRef ref{.repo = repo};
      if (commit != newest) ref.revision = commit;
      const std::vector<RepoFile> there = files(repo, commit);
      for (const RepoFile& m : gguf_models(there)) {
        const std::string quant = quant_of(m.path);
        // A quantisation's name is enough if it means this file.
        ref.quant = quant.empty() ? m.path : quant;
        auto selection = select_files(there, ref.quant, repo);
        if (selection.ok() && selection->main != m.path) {
          ref.quant = m.path;
          selection = select_files(there, ref.quant, repo);
        }
        if (selection.ok())
          models.push_back(make_model(*this, ref, commit, std::move(selection).value()));
      }
      auto selection = select_files(there, "safetensors", repo);
      ref.quant.clear();
      if (selection.ok() && is_complete(repo, commit, *selection))
        models.push_back(make_model(*this, ref, commit, std::move(selection).value()));
    }
  }
  return models;
}

Result<int64_t> Cache::remove(const ModelRef& ref) const {
  const std::string folder = repo_dir(ref.repo);
  std::error_code error;
  if (!fs::is_directory(folder, error)) return not_found("{} is not there", ref.text());
  const int64_t before = size_of_folder(folder);
  if (!ref.quant.empty()) {
    const auto model = locate(ref);
    if (!model) return not_found("{} is not there", ref.text());
    const std::string snapshot = snapshot_dir(ref.repo, model->commit);
    for (const RepoFile& f : model->selection.files) fs::remove(snapshot + "/" + f.path, error);
    std::set<std::string> needed;
    bool anything = false;
    for (const std::string& commit : commits_of(*this, ref.repo, std::nullopt)) {
      for (const RepoFile& f : files(ref.repo, commit)) {
        needed.insert(f.blob);
        anything = true;
      }
    }
    for (const std::string& blob : names_in(folder + "/blobs")) {
      if (!needed.contains(blob) && !blob.ends_with(".incomplete"))
        fs::remove(blob_path(ref.repo, blob), error);
    }
    if (anything) return before - size_of_folder(folder);
  }
  fs::remove_all(folder, error);
  if (error) return io_error("cannot remove {}: {}", folder, error.message());
  fs::remove_all(root_ + "/.locks/" + repo_folder(ref.repo), error);
  return before;
}

Result<BlobLock> BlobLock::open(const Cache& cache, const std::string& repo,
                                const std::string& blob) {
  const std::string folder = cache.root() + "/.locks/" + repo_folder(repo);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) return cannot_create(folder, error);
  const std::string path = folder + "/" + blob + ".lock";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return cannot_create(path, {errno, std::generic_category()});
  return BlobLock(fd);
}

bool BlobLock::try_take() {
  return ::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

Status BlobLock::wait() {
  while (::flock(fd_, LOCK_EX) != 0) {
    if (errno != EINTR)
      return io_error("cannot lock a download: {}", std::generic_category().message(errno));
  }
  return {};
}

BlobLock::~BlobLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace freshet::hub

#include "hub/pull.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/units.h"
#include "hub/blob_writer.h"

namespace freshet::hub {
namespace {

namespace fs = std::filesystem;

bool is_file(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

int64_t size_or_zero(const std::string& path) {
  std::error_code error;
  const auto size = fs::file_size(path, error);
  return error ? 0 : static_cast<int64_t>(size);
}

std::string resolve_url(const Settings& s, const ModelRef& ref, const std::string& commit,
                        const std::string& path) {
  return fmt::format("{}/{}/resolve/{}/{}", s.endpoint, ref.repo, commit, http::escape_path(path));
}

// Asks for the hash and the size of a file that the listing gives without them.
Status complete_entry(HubClient& client, const ModelRef& ref, const std::string& commit,
                      RepoFile& file) {
  HubClient::Fetch f{.method = "HEAD",
                     .url = resolve_url(client.settings(), ref, commit, file.path),
                     .on_answer = {},
                     .sink = {}};
  FRESHET_ASSIGN_OR_RETURN(const Answer answer, client.fetch(f));
  if (answer.status != 200) return failure_of(answer, ref.repo, client.settings());
  if (file.blob.empty()) file.blob = answer.etag;
  if (file.size < 0) file.size = answer.size;
  if (!is_blob_name(file.blob))
    return invalid_argument("{} gives {} no usable hash (ETag)", client.settings().endpoint,
                            file.path);
  return {};
}

class Puller {
 public:
  Puller(const Settings& settings, const ModelRef& ref, const Observer& observer)
      : settings_(settings),
        ref_(ref),
        observer_(observer),
        client_(settings),
        cache_(settings.cache) {}

  Result<Pulled> run();

 private:
  Status fetch(const RepoFile& file, const std::string& commit, Meter& meter);

  const Settings& settings_;
  const ModelRef& ref_;
  const Observer& observer_;
  HubClient client_;
  Cache cache_;
};

Status Puller::fetch(const RepoFile& file, const std::string& commit, Meter& meter) {
  const std::string blob = cache_.blob_path(ref_.repo, file.blob);
  meter.begin_file(file.path);
  const auto waits = [&] {
    observer_.note(fmt::format("{}: another process downloads it; waiting", file.path));
  };
  FRESHET_ASSIGN_OR_RETURN(const auto lock, BlobLock::take(cache_, ref_.repo, file.blob, waits));
  if (is_file(blob)) {
    meter.have(size_or_zero(blob));
  } else {
    DownloadJob job{.url = resolve_url(settings_, ref_, commit, file.path),
                    .what = ref_.repo,
                    .partial = blob + ".incomplete",
                    .final = blob,
                    .size = file.size,
                    .blob = file.blob};
    FRESHET_RETURN_IF_ERROR(download(client_, job, meter, observer_).with_context(file.path));
  }
  return cache_.link(ref_.repo, commit, file.path, file.blob);
}

Result<Pulled> Puller::run() {
  FRESHET_ASSIGN_OR_RETURN(const Listing listing, list_repo(client_, ref_, observer_));
  FRESHET_ASSIGN_OR_RETURN(Selection selection, select_files(listing.files, ref_.quant, ref_.repo));
  Pulled pulled{.model = {}, .licence = listing.licence, .gated = listing.gated};
  int64_t on_disk = 0;
  for (RepoFile& file : selection.files) {
    if (file.blob.empty() || file.size < 0)
      FRESHET_RETURN_IF_ERROR(complete_entry(client_, ref_, listing.commit, file));
    const std::string blob = cache_.blob_path(ref_.repo, file.blob);
    const int64_t needed = std::max<int64_t>(file.size, 0);
    if (is_file(blob)) continue;
    pulled.downloaded += needed;
    on_disk += std::min(needed, size_or_zero(blob + ".incomplete"));
  }
  FRESHET_RETURN_IF_ERROR(
      check_space(settings_.cache, pulled.downloaded - on_disk).with_context(ref_.text()));
  FRESHET_RETURN_IF_ERROR(cache_.prepare(ref_.repo));
  Meter meter(observer_, selection.bytes());
  for (const RepoFile& file : selection.files)
    FRESHET_RETURN_IF_ERROR(fetch(file, listing.commit, meter));
  if (!has_tokenizer(selection))
    FRESHET_RETURN_IF_ERROR(cache_.note_no_tokenizer(ref_.repo, listing.commit));
  FRESHET_RETURN_IF_ERROR(cache_.write_ref(ref_.repo, ref_.revision, listing.commit));
  // The snapshot may hold more, but what was selected is found again.
  ModelRef exact = ref_;
  exact.revision = listing.commit;
  if (selection.gguf) exact.quant = selection.main;
  if (!selection.gguf) exact.quant = "safetensors";
  auto model = cache_.locate(exact);
  if (!model)
    return invalid_argument("{} is not a complete model: files of it are missing in the repository",
                            ref_.text());
  pulled.model = *std::move(model);
  pulled.model.ref = ref_;
  return pulled;
}

}  // namespace

Result<Listing> list_repo(HubClient& client, const ModelRef& ref, const Observer& observer) {
  const Settings& s = client.settings();
  if (s.offline)
    return not_found("{} is not on this machine, and HF_HUB_OFFLINE forbids the network",
                     ref.text());
  std::string revision;
  for (const char c : ref.revision) revision += c == '/' ? "%2F" : std::string(1, c);
  const std::string url =
      fmt::format("{}/api/models/{}/revision/{}?blobs=true", s.endpoint, ref.repo, revision);
  FRESHET_ASSIGN_OR_RETURN(const Answer answer, client.get_text(url, observer.note));
  if (answer.status != 200) return failure_of(answer, ref.repo, s);
  auto listing = parse_listing(answer.body);
  if (!listing.ok()) return listing.status().with_context(ref.repo);
  return listing;
}

Result<Pulled> pull(const Settings& settings, const ModelRef& ref, const Observer& observer) {
  return Puller(settings, ref, observer).run();
}

Result<std::string> path_of_url(const std::string& folder, const std::string& url) {
  FRESHET_ASSIGN_OR_RETURN(const auto parsed, http::parse_resource_url(url));
  const std::string path = parsed.target.substr(0, parsed.target.find('?'));
  const std::string name = http::unescape(path.substr(path.rfind('/') + 1));
  if (!name.ends_with(".gguf") || name.size() > 200 || !check_file_path(name).ok() ||
      name.find('/') != name.npos)
    return invalid_argument("{}{}: only .gguf files can be fetched from a URL",
                            parsed.server.origin(), path);
  // Queries of signed URLs change; the file stays the same.
  const std::string key = sha256_of(parsed.server.origin() + path).substr(0, 16);
  return fmt::format("{}/downloads/{}/{}", folder, key, name);
}

Result<std::string> pull_url(const Settings& settings, const std::string& folder,
                             const std::string& url, const Observer& observer) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, path_of_url(folder, url));
  if (is_file(path)) return path;
  if (settings.offline)
    return not_found("{} is not on this machine, and HF_HUB_OFFLINE forbids the network",
                     url.substr(0, url.find('?')));
  HubClient client(settings);
  const HubClient::Fetch f{.method = "HEAD", .url = url, .on_answer = {}, .sink = {}};
  FRESHET_ASSIGN_OR_RETURN(const Answer head, client.fetch(f));
  const std::string shown = url.substr(0, url.find('?'));
  std::string version = "unknown";
  DownloadJob job{.url = url, .what = shown, .partial = {}, .final = path, .size = -1, .blob = {}};
  if (head.status == 200) {
    const std::string_view length = head.head.header("content-length");
    if (std::from_chars(length.data(), length.data() + length.size(), job.size).ec != std::errc())
      job.size = -1;
    version = sha256_of(fmt::format("{} {}", head.head.header("etag"), job.size)).substr(0, 16);
  }
  // Bytes of another version of the file must not be continued.
  job.partial = fmt::format("{}.{}.incomplete", path, version);
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  if (error) return io_error("cannot create {}: {}", path, error.message());
  if (version == "unknown") fs::remove(job.partial, error);
  FRESHET_RETURN_IF_ERROR(
      check_space(folder, std::max<int64_t>(job.size, 0) - size_or_zero(job.partial))
          .with_context(shown));
  Meter meter(observer, std::max<int64_t>(job.size, 0));
  meter.begin_file(fs::path(path).filename().string());
  FRESHET_RETURN_IF_ERROR(download(client, job, meter, observer));
  return path;
}

Status check_space(const std::string& folder, int64_t bytes) {
  fs::path at = folder;
  std::error_code error;
  while (!at.empty() && !fs::exists(at, error) && at != at.parent_path()) at = at.parent_path();
  const fs::space_info space = fs::space(at.empty() ? fs::path(".") : at, error);
  if (error || bytes <= 0) return {};
  if (static_cast<uint64_t>(bytes) <= space.available) return {};
  return resource_exhausted(
      "needs {} but {} has {} free: make room, or set HF_HUB_CACHE to a "
      "folder on another disk",
      format_bytes(static_cast<size_t>(bytes)), folder,
      format_bytes(static_cast<size_t>(space.available)));
}

}  // namespace freshet::hub

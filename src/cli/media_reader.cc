#include "cli/media_reader.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <utility>

#include <boost/asio/io_context.hpp>

#include "http/client.h"
#include "hub/settings.h"

namespace freshet::cli {
namespace {

namespace fs = std::filesystem;
using MediaClock = std::chrono::steady_clock;

constexpr int kMediaRedirects = 5;

// A path of the folder, after symbolic links.
Result<std::vector<uint8_t>> read_local(const std::string& url, const media::MediaPolicy& policy) {
  std::error_code error;
  const fs::path folder = fs::canonical(policy.local_folder, error);
  if (error) return invalid_argument("the folder of --allowed-local-media-path is not there");
  const std::string_view path = std::string_view(url).substr(std::string_view("file://").size());
  const fs::path file = fs::canonical(http::unescape(path), error);
  const auto outside = [&] {
    const auto [in_folder, rest] =
        std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
    return in_folder != folder.end();
  };
  // One message for both: what else there is on this machine is not told.
  if (error || outside())
    return invalid_argument("there is no such file in the folder that file: URLs may name");
  return read_media_file(file.string(), policy.encoded_bytes);
}

struct MediaDownload {
  int status = 0;
  std::string location;
  std::vector<uint8_t> bytes;
};

Result<MediaDownload> download_once(const http::ResourceUrl& url, size_t limit,
                                    MediaClock::time_point deadline) {
  const auto left = [&] {
    return std::chrono::duration<double>(deadline - MediaClock::now()).count();
  };
  http::ClientOptions options;
  options.url = url.server;
  options.connect_timeout_s = options.read_timeout_s = std::max(0.01, left());
  FRESHET_ASSIGN_OR_RETURN(const hub::Settings settings, hub::Settings::from_environment());
  FRESHET_RETURN_IF_ERROR(hub::apply_proxy(settings, options));
  boost::asio::io_context io;
  FRESHET_ASSIGN_OR_RETURN(const auto client, http::Client::create(io, std::move(options)));
  MediaDownload download;
  bool large = false, late = false;
  const auto on_head = [](const http::Reply&) { return true; };
  const auto sink = [&](std::string_view piece) {
    large = download.bytes.size() + piece.size() > limit;
    late = left() <= 0;
    if (large || late) return false;
    download.bytes.insert(download.bytes.end(), piece.begin(), piece.end());
    return true;
  };
  auto reply = client->exchange({.target = url.target}, on_head, sink);
  if (large) return resource_exhausted("the file has more than {} bytes", limit);
  if (late) return io_error("{} took too long", url.server.host);
  if (!reply.ok()) return reply.status();
  download.status = reply->status;
  download.location = reply->header("location");
  return download;
}

}  // namespace

Result<std::vector<uint8_t>> read_media_file(const std::string& path, size_t limit) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return not_found("{}: no such file", path);
  const auto size = fs::file_size(path, error);
  if (error) return io_error("{}: cannot be read", path);
  if (size > limit)
    return resource_exhausted("the file has {} bytes; the limit is {}", size, limit);
  std::vector<uint8_t> bytes(size);
  std::ifstream in(path, std::ios::binary);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!in || static_cast<uintmax_t>(in.gcount()) != size)
    return io_error("{}: cannot be read", path);
  return bytes;
}

Result<std::vector<uint8_t>> MediaReader::read(const std::string& url) const {
  FRESHET_ASSIGN_OR_RETURN(const media::UrlKind kind, media::check_media_url(url, policy));
  if (kind == media::UrlKind::kFile) return read_local(url, policy);
  const auto deadline = MediaClock::now() + std::chrono::duration_cast<MediaClock::duration>(
                                                std::chrono::duration<double>(timeout_s));
  FRESHET_ASSIGN_OR_RETURN(http::ResourceUrl at, http::parse_resource_url(url));
  for (int hop = 0; hop <= kMediaRedirects; ++hop) {
    FRESHET_ASSIGN_OR_RETURN(MediaDownload got, download_once(at, policy.encoded_bytes, deadline));
    if (got.status == 200) return std::move(got.bytes);
    if (got.status < 300 || got.status >= 400 || got.location.empty())
      return invalid_argument("{} answers {}", at.server.host, got.status);
    FRESHET_ASSIGN_OR_RETURN(at, http::resolve_location(at, got.location));
    FRESHET_ASSIGN_OR_RETURN(const media::UrlKind next, media::check_media_url(at.text(), policy));
    if (next != media::UrlKind::kFetch) return invalid_argument("a redirection to a file");
  }
  return invalid_argument("{} redirects more than {} times", at.server.host, kMediaRedirects);
}

}  // namespace freshet::cli

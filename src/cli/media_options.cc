#include "cli/media_options.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/json.h"
#include "cli/help.h"
#include "cli/media_reader.h"
#include "cli/options.h"

namespace freshet::cli {
namespace {

constexpr int64_t kMostPictures = 999;  // vLLM's default

// vLLM's {"image": 4} or {"image": {"count": 4}}. Other kinds may be forbidden, as they are anyway.
Result<int> pictures_allowed(const std::string& text) {
  const auto wrong = [&] {
    return invalid_argument(
        "--limit-mm-per-prompt '{}': must be JSON such as '{{\"image\": 4}}', from 0 to {}", text,
        kMostPictures);
  };
  const auto limits = json::parse(text);
  if (!limits.ok() || !limits->is_object()) return wrong();
  int pictures = media::MediaPolicy{}.pictures_per_request;
  for (const auto& [kind, limit] : limits->as_object()) {
    const json::Value* count = limit.is_object() ? limit.find("count") : &limit;
    const auto number = count != nullptr && count->is_number() ? count->as_int64() : std::nullopt;
    if (!number || *number < 0 || *number > kMostPictures) return wrong();
    if (kind == "image") {
      pictures = static_cast<int>(*number);
    } else if (*number > 0) {
      return invalid_argument("--limit-mm-per-prompt: '{}' is not supported: only 'image' is",
                              kind);
    }
  }
  return pictures;
}

}  // namespace

void add_media_options(CLI::App& command, MediaFlags& flags) {
  command
      .add_option("--allowed-media-domains", flags.domains,
                  "Hosts from which pictures may be fetched: HOST or HOST:PORT for https, "
                  "http://HOST[:PORT] for http (default: data: URLs only)")
      ->group("Pictures");
  command
      .add_option("--allowed-local-media-path", flags.local_path,
                  "Folder from which requests may name pictures as file: URLs (default: none)")
      ->group("Pictures");
  command
      .add_option("--limit-mm-per-prompt", flags.limit_per_prompt,
                  "Most pictures of a conversation, as JSON: '{\"image\": 4}' (default: 16)")
      ->group("Pictures");
  command
      .add_option("--mm-processor-cache-gb", flags.cache_gib,
                  "Host memory for what the vision tower made of pictures, in GiB")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1024.0))
      ->group("Pictures");
  command
      .add_option("--media-fetch-timeout", flags.fetch_timeout_s,
                  "Seconds that fetching a picture may take")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
}

Result<server::MediaOptions> media_options(const MediaFlags& flags) {
  server::MediaOptions options;
  for (const std::string& host : flags.domains) {
    const Status allowed = media::check_media_host(host);
    if (!allowed.ok()) return invalid_argument("--allowed-media-domains: {}", allowed.message());
    options.policy.allowed_hosts.push_back(host);
  }
  if (!flags.local_path.empty()) {
    std::error_code error;
    const auto folder = std::filesystem::canonical(flags.local_path, error);
    if (error || !std::filesystem::is_directory(folder, error))
      return not_found("--allowed-local-media-path {}: no such folder", flags.local_path);
    options.policy.local_folder = folder.string();
  }
  if (!flags.limit_per_prompt.empty()) {
    FRESHET_ASSIGN_OR_RETURN(options.policy.pictures_per_request,
                             pictures_allowed(flags.limit_per_prompt));
  }
  options.fetch = [reader = MediaReader{options.policy, flags.fetch_timeout_s}](
                      const std::string& url) { return reader.read(url); };
  return options;
}

}  // namespace freshet::cli

#include "hub/settings.h"

#include <charconv>
#include <fstream>
#include <vector>

#include <openssl/evp.h>

#include "base/env.h"

namespace freshet::hub {
namespace {

constexpr const char* kPublicHub = "https://huggingface.co";

bool is_true(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
  return text == "1" || text == "true" || text == "yes" || text == "on";
}

std::string trimmed(std::string text) {
  constexpr const char* kBlank = " \t\r\n";
  text.erase(0, std::min(text.find_first_not_of(kBlank), text.size()));
  text.erase(text.find_last_not_of(kBlank) + 1);
  return text;
}

// "~/x" with the user's home folder.
std::string expanded(const std::string& path) {
  const auto home = env(EnvVar::kHome);
  if (home && (path == "~" || path.starts_with("~/"))) return *home + path.substr(1);
  return path;
}

std::string token_of(const std::string& hub_home) {
  if (const auto token = env(EnvVar::kHfToken)) return trimmed(*token);
  const std::string path =
      expanded(env(EnvVar::kHfTokenPath).value_or(hub_home.empty() ? "" : hub_home + "/token"));
  std::ifstream file(path);
  std::string line;
  if (file) std::getline(file, line);
  return trimmed(line);
}

Status check_token(const std::string& token) {
  for (const char c : token) {
    if (c <= ' ' || c >= 127)
      return invalid_argument("the access token (HF_TOKEN or its file) has invalid characters");
  }
  return {};
}

std::string base64(std::string_view text) {
  std::string out(4 * ((text.size() + 2) / 3) + 1, '\0');
  const int size = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(out.data()),
                                   reinterpret_cast<const unsigned char*>(text.data()),
                                   static_cast<int>(text.size()));
  out.resize(static_cast<size_t>(size));
  return out;
}

}  // namespace

Result<Settings> Settings::from_environment() {
  Settings s;
  const auto home = env(EnvVar::kHome);
  std::string hub_home;
  if (const auto given = env(EnvVar::kHfHome)) {
    hub_home = expanded(*given);
  } else if (const auto cache = env(EnvVar::kXdgCacheHome)) {
    hub_home = *cache + "/huggingface";
  } else if (home) {
    hub_home = *home + "/.cache/huggingface";
  }
  s.cache = expanded(env(EnvVar::kHfHubCache).value_or(hub_home.empty() ? "" : hub_home + "/hub"));
  if (s.cache.empty()) return not_found("no folder for models from the hub: set HF_HOME or HOME");
  s.endpoint = trimmed(env(EnvVar::kHfEndpoint).value_or(kPublicHub));
  while (s.endpoint.ends_with('/')) s.endpoint.pop_back();
  if (const auto url = http::parse_url(s.endpoint); !url.ok())
    return url.status().with_context("HF_ENDPOINT");
  s.token = token_of(hub_home);
  FRESHET_RETURN_IF_ERROR(check_token(s.token));
  s.offline = is_true(env(EnvVar::kHfOffline).value_or(""));
  if (const auto text = env(EnvVar::kHfTimeout)) {
    const char* const end = text->data() + text->size();
    const auto [rest, error] = std::from_chars(text->data(), end, s.timeout_s);
    if (error != std::errc() || rest != end || !(s.timeout_s > 0.0 && s.timeout_s < 1e6))
      return invalid_argument("HF_HUB_DOWNLOAD_TIMEOUT: '{}' is not a number of seconds", *text);
  }
  s.https_proxy = env(EnvVar::kHttpsProxy).value_or("");
  s.http_proxy = env(EnvVar::kHttpProxy).value_or("");
  s.no_proxy = env(EnvVar::kNoProxy).value_or("");
  return s;
}

bool bypasses_proxy(std::string_view no_proxy, std::string_view host, int port) {
  while (!no_proxy.empty()) {
    const size_t comma = std::min(no_proxy.find(','), no_proxy.size());
    std::string item = trimmed(std::string(no_proxy.substr(0, comma)));
    no_proxy.remove_prefix(std::min(comma + 1, no_proxy.size()));
    if (item == "*") return true;
    const std::string with_port = fmt::format(":{}", port);
    if (item.ends_with(with_port)) item.resize(item.size() - with_port.size());
    if (item.starts_with("*.")) item.erase(0, 1);
    if (item.empty()) continue;
    const std::string bare = item.starts_with('.') ? item.substr(1) : item;
    if (host == bare || host.ends_with("." + bare)) return true;
  }
  return false;
}

Status apply_proxy(const Settings& s, http::ClientOptions& options) {
  const bool tls = options.url.tls;
  std::string proxy = tls ? s.https_proxy : s.http_proxy;
  if (proxy.empty() || bypasses_proxy(s.no_proxy, options.url.host, options.url.port)) return {};
  const char* const variable = tls ? "HTTPS_PROXY" : "http_proxy";
  if (proxy.find("://") == proxy.npos) proxy.insert(0, "http://");
  const size_t begin = proxy.find("://") + 3;
  if (const size_t at = proxy.rfind('@'); at != proxy.npos && at >= begin) {
    const std::string user = http::unescape(proxy.substr(begin, at - begin));
    options.proxy_authorization = "Basic " + base64(user);
    proxy.erase(begin, at + 1 - begin);
  }
  const auto url = http::parse_url(proxy);
  if (!url.ok() || url->tls)
    return invalid_argument("{} is not the URL of a proxy such as http://proxy:3128", variable);
  options.proxy = *url;
  return {};
}

}  // namespace freshet::hub

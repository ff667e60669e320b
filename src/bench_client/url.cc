#include "bench_client/url.h"

#include <charconv>

namespace freshet::bench_client {

std::string Url::host_header() const {
  const std::string name = host.find(':') == std::string::npos ? host : "[" + host + "]";
  return port == (tls ? 443 : 80) ? name : fmt::format("{}:{}", name, port);
}

std::string Url::text() const {
  return fmt::format("{}://{}{}", tls ? "https" : "http", host_header(), prefix);
}

Result<Url> parse_url(std::string_view text) {
  const auto refuse = [&](const char* why) {
    return invalid_argument("'{}' {}: give something like http://127.0.0.1:8000", text, why);
  };
  Url url;
  std::string_view rest = text;
  if (rest.starts_with("https://")) {
    url.tls = true;
    url.port = 443;
    rest.remove_prefix(8);
  } else if (rest.starts_with("http://")) {
    rest.remove_prefix(7);
  } else {
    return refuse("is not an http or https URL");
  }
  for (const char c : rest) {
    if (c <= ' ' || c >= 127 || c == '@' || c == '?' || c == '#' || c == '\\')
      return refuse("has an invalid character");
  }
  const size_t slash = std::min(rest.find('/'), rest.size());
  url.prefix = rest.substr(slash);
  while (!url.prefix.empty() && url.prefix.back() == '/') url.prefix.pop_back();
  std::string_view authority = rest.substr(0, slash);
  std::string_view port;
  if (authority.starts_with('[')) {
    const size_t close = authority.find(']');
    if (close == std::string_view::npos) return refuse("lacks a ']'");
    url.host = authority.substr(1, close - 1);
    port = authority.substr(close + 1);
    if (!port.empty() && port.front() != ':') return refuse("has extra text after ']'");
  } else {
    const size_t colon = std::min(authority.find(':'), authority.size());
    url.host = authority.substr(0, colon);
    port = authority.substr(colon);
  }
  if (url.host.empty()) return refuse("has no host");
  if (!port.empty()) {
    port.remove_prefix(1);
    const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), url.port);
    if (error != std::errc() || end != port.data() + port.size() || url.port == 0)
      return refuse("has no valid port");
  }
  return url;
}

}  // namespace freshet::bench_client

#include "http/url.h"

#include <algorithm>
#include <charconv>

namespace freshet::http {

std::string Url::host_header() const {
  const std::string name = host.find(':') == std::string::npos ? host : "[" + host + "]";
  return port == (tls ? 443 : 80) ? name : fmt::format("{}:{}", name, port);
}

std::string Url::origin() const {
  return fmt::format("{}://{}", tls ? "https" : "http", host_header());
}

std::string Url::text() const {
  return origin() + prefix;
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

Result<ResourceUrl> parse_resource_url(std::string_view text) {
  text = text.substr(0, text.find('#'));
  const size_t scheme = text.find("://");
  const size_t end = scheme == text.npos ? text.npos : text.find_first_of("/?", scheme + 3);
  const std::string_view shown = text.substr(0, text.find('?'));
  const auto server = parse_url(text.substr(0, end));
  if (!server.ok()) {
    return invalid_argument("'{}' is not an http or https URL such as https://host/model.gguf",
                            shown);
  }
  ResourceUrl url{*server, std::string(end == text.npos ? "" : text.substr(end))};
  if (!url.target.starts_with('/')) url.target.insert(0, "/");
  for (const char c : url.target) {
    if (c <= ' ' || c >= 127 || c == '\\')
      return invalid_argument("'{}' has an invalid character: escape it as %XX", shown);
  }
  return url;
}

Result<ResourceUrl> resolve_location(const ResourceUrl& from, std::string_view location) {
  if (location.starts_with("//"))
    return parse_resource_url((from.server.tls ? "https:" : "http:") + std::string(location));
  if (location.starts_with('/')) return parse_resource_url(from.server.origin().append(location));
  return parse_resource_url(location);
}

std::string escape_path(std::string_view path) {
  std::string out;
  for (const char c : path) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("-._~/").find(c) != std::string_view::npos;
    if (plain) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string unescape(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned byte = 0;
    const char* const digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace freshet::http

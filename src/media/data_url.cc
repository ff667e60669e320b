#include "media/data_url.h"

#include <algorithm>
#include <array>
#include <optional>

namespace freshet::media {
namespace {

constexpr std::array<int8_t, 256> kSixBits = [] {
  std::array<int8_t, 256> values{};
  values.fill(-1);
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kAlphabet.size(); ++i) {
    values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
  }
  return values;
}();

std::string in_lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

bool has_scheme(std::string_view url, std::string_view scheme) {
  return in_lower_case(url.substr(0, scheme.size())) == scheme;
}

// For messages: a prefix without control characters.
std::string shown(std::string_view text) {
  std::string out(text.substr(0, 60));
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 32 || static_cast<unsigned char>(c) > 126) c = '?';
  }
  return out + (text.size() > 60 ? "..." : "");
}

// "https://host" or "http://host:8000" of a URL, the port only if it is not the scheme's; nothing
// if the URL has a user, an IPv6 address or characters that parsers read in different ways.
std::optional<std::string> origin_of(std::string_view url) {
  const bool tls = has_scheme(url, "https://");
  const bool plain = std::all_of(url.begin(), url.end(), [](char c) {
    return static_cast<unsigned char>(c) > 32 && static_cast<unsigned char>(c) < 127 && c != '\\';
  });
  std::string_view host = url.substr(tls ? 8 : 7);
  host = host.substr(0, host.find_first_of("/?#"));
  std::string_view port;
  if (const size_t colon = host.find(':'); colon != host.npos) {
    port = host.substr(colon + 1);
    host = host.substr(0, colon);
    if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != port.npos)
      return std::nullopt;
  }
  if (!plain || host.empty() || host.find_first_of("@:[]%") != host.npos) return std::nullopt;
  std::string origin = (tls ? "https://" : "http://") + in_lower_case(host);
  if (!port.empty() && port != (tls ? "443" : "80")) origin.append(":").append(port);
  return origin;
}

}  // namespace

Result<std::vector<uint8_t>> decode_base64(std::string_view text, size_t limit) {
  if (text.size() % 4 != 0) {
    return invalid_argument(
        "base64 must have a multiple of 4 characters, padded with '='; there "
        "are {}",
        text.size());
  }
  size_t padding = 0;
  while (padding < 2 && text.size() > padding && text[text.size() - 1 - padding] == '=') ++padding;
  const size_t size = text.size() / 4 * 3 - padding;
  if (size > limit) {
    return resource_exhausted("the data has {} bytes; the limit is {}", size, limit);
  }
  std::vector<uint8_t> out;
  out.reserve(size);
  uint32_t bits = 0;
  const size_t digits = text.size() - padding;
  for (size_t i = 0; i < digits; ++i) {
    const int value = kSixBits[static_cast<uint8_t>(text[i])];
    if (value < 0) {
      return invalid_argument("base64 has no character '{}' (at {})", shown(text.substr(i, 1)), i);
    }
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 == 1) out.push_back(static_cast<uint8_t>(bits >> 4));
    if (i % 4 == 2) out.push_back(static_cast<uint8_t>(bits >> 2));
    if (i % 4 == 3) out.push_back(static_cast<uint8_t>(bits));
  }
  const uint32_t rest = padding == 1 ? bits & 3 : padding == 2 ? bits & 15 : 0;
  if (rest != 0) return invalid_argument("base64 ends with bits that belong to no byte");
  return out;
}

Result<DataUrl> decode_data_url(std::string_view url, size_t limit) {
  if (!has_scheme(url, "data:")) return invalid_argument("\"{}\" is no data: URL", shown(url));
  const size_t comma = url.find(',');
  if (comma == std::string_view::npos) {
    return invalid_argument("the data: URL has no comma before its data");
  }
  const std::string_view head = url.substr(5, comma - 5);
  if (!in_lower_case(head).ends_with(";base64")) {
    return invalid_argument("the data: URL must be base64: \"data:image/png;base64,...\"");
  }
  DataUrl out;
  out.media_type = in_lower_case(head.substr(0, head.find(';')));
  auto bytes = decode_base64(url.substr(comma + 1), limit);
  if (!bytes.ok()) return bytes.status().with_context("data: URL");
  out.bytes = std::move(bytes).value();
  return out;
}

Status check_media_host(std::string_view host) {
  const bool plain = has_scheme(host, "http://");
  const std::string url = (plain ? "" : "https://") + std::string(host);
  const auto origin = origin_of(url);
  if (!origin || url.find('/', plain ? 7 : 8) != std::string::npos)
    return invalid_argument("\"{}\" must be HOST, HOST:PORT or http://HOST:PORT", shown(host));
  return {};
}

Result<UrlKind> check_media_url(std::string_view url, const MediaPolicy& policy) {
  if (has_scheme(url, "data:")) return UrlKind::kData;
  if (has_scheme(url, "file:") && !policy.local_folder.empty()) {
    if (!has_scheme(url, "file:///"))
      return invalid_argument("\"{}\" must be file:///PATH", shown(url));
    return UrlKind::kFile;
  }
  if (policy.allowed_hosts.empty()) {
    return invalid_argument("\"{}\" is no data: URL; others are not read here", shown(url));
  }
  if (!has_scheme(url, "https://") && !has_scheme(url, "http://")) {
    return invalid_argument("\"{}\" is neither a data: nor an https: URL", shown(url));
  }
  const auto origin = origin_of(url);
  if (!origin) {
    return invalid_argument("\"{}\" must be https://HOST/PATH, without a user", shown(url));
  }
  for (const std::string& host : policy.allowed_hosts) {
    const bool plain = has_scheme(host, "http://");
    if (origin == origin_of((plain ? "" : "https://") + host)) return UrlKind::kFetch;
  }
  return invalid_argument("host \"{}\" is not allowed", shown(*origin));
}

}  // namespace freshet::media

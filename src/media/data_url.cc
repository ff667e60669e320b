#include "media/data_url.h"

#include <algorithm>
#include <array>

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

Result<UrlKind> check_media_url(std::string_view url, const MediaPolicy& policy) {
  if (has_scheme(url, "data:")) return UrlKind::kData;
  if (policy.allowed_hosts.empty()) {
    return invalid_argument("\"{}\" is no data: URL; others are not read here", shown(url));
  }
  if (!has_scheme(url, "https://")) {
    return invalid_argument("\"{}\" is neither a data: nor an https: URL", shown(url));
  }
  const bool plain = std::all_of(url.begin(), url.end(), [](char c) {
    return static_cast<unsigned char>(c) > 32 && static_cast<unsigned char>(c) < 127 && c != '\\';
  });
  std::string_view host = url.substr(8);
  host = host.substr(0, host.find_first_of("/?#"));
  if (!plain || host.empty() || host.find_first_of("@:[]") != std::string_view::npos) {
    return invalid_argument("\"{}\" must be https://HOST/PATH, without user or port", shown(url));
  }
  const std::string name = in_lower_case(host);
  if (std::find(policy.allowed_hosts.begin(), policy.allowed_hosts.end(), name) ==
      policy.allowed_hosts.end()) {
    return invalid_argument("host \"{}\" is not allowed", shown(name));
  }
  return UrlKind::kFetch;
}

}  // namespace freshet::media

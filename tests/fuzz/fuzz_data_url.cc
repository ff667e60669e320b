// Any text as a data: URL: no crash, and what was decoded is written back as the same text.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "media/data_url.h"

namespace {

std::string in_base64(const std::vector<uint8_t>& bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t word = 0;
    for (size_t k = 0; k < 3; ++k) word = word << 8 | (i + k < bytes.size() ? bytes[i + k] : 0);
    for (size_t k = 0; k < 4; ++k) {
      out += i + k > bytes.size() ? '=' : kDigits[word >> (18 - 6 * k) & 63];
    }
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto url = media::decode_data_url(text, 4096);
  if (url.ok()) {
    FRESHET_CHECK(url->bytes.size() <= 4096);
    FRESHET_CHECK(text.substr(text.find(',') + 1) == in_base64(url->bytes));
  } else {
    FRESHET_CHECK(url.status().message().find('\n') == std::string::npos);
  }
  const auto kind = media::check_media_url(text, {.allowed_hosts = {"example.org"}});
  if (kind.ok() && *kind == media::UrlKind::kFetch) {
    const char next = text.size() > 19 ? text[19] : '/';
    FRESHET_CHECK(next == '/' || next == '?' || next == '#');
  }
  return 0;
}

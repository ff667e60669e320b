#include "tokenizer/base64.h"

#include <array>
#include <cstdint>

namespace freshet::tokenizer {

std::optional<std::string> decode_base64(std::string_view text) {
  static constexpr std::array<int8_t, 256> kValues = [] {
    std::array<int8_t, 256> values{};
    values.fill(-1);
    constexpr std::string_view kAlphabet =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < kAlphabet.size(); ++i) {
      values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
    }
    return values;
  }();
  while (text.ends_with('=')) text.remove_suffix(1);
  if (text.size() % 4 == 1) return std::nullopt;
  std::string out;
  out.reserve(text.size() / 4 * 3 + 2);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const int value = kValues[static_cast<uint8_t>(c)];
    if (value < 0) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      out.push_back(static_cast<char>(static_cast<uint8_t>(bits >> count)));
    }
  }
  return out;
}

}  // namespace freshet::tokenizer

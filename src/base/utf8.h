// UTF-8, strictly: no overlong forms, no surrogates, nothing beyond U+10FFFF (Unicode 15, table
// 3-7). Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace freshet {

struct Utf8Char {
  char32_t code = 0xFFFD;
  size_t size = 1;  // bytes taken; for a bad sequence, its maximal well-formed prefix (at least 1)
  bool valid = false;
};

// Decodes the character at s[0]. REQUIRES: s is not empty.
inline Utf8Char decode_utf8(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1, true};
  const size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {};
  // The range of the second byte excludes overlong forms, surrogates and values above 10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (s.size() < 2 || byte(1) < low || byte(1) > high) return {};
  char32_t code = lead & (0x7F >> size);
  code = (code << 6) | (byte(1) & 0x3F);
  for (size_t i = 2; i < size; ++i) {
    if (i >= s.size() || (byte(i) & 0xC0) != 0x80) return {0xFFFD, i, false};
    code = (code << 6) | (byte(i) & 0x3F);
  }
  return {code, size, true};
}

// REQUIRES: code <= 0x10FFFF and not a surrogate.
inline void append_utf8(std::string& out, char32_t code) {
  const auto put = [&](char32_t b) { out.push_back(static_cast<char>(static_cast<uint8_t>(b))); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 0x3F));
    put(0x80 | ((code >> 6) & 0x3F));
    put(0x80 | (code & 0x3F));
  }
}

// The offset of the first ill-formed byte, or npos.
inline size_t find_invalid_utf8(std::string_view s) {
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = decode_utf8(s.substr(i, 4));
    if (!c.valid) return i;
    i += c.size;
  }
  return std::string_view::npos;
}

}  // namespace freshet

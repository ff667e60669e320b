#include "grammar/text_cursor.h"

#include <cctype>

namespace freshet::grammar {

std::optional<int> TextCursor::number() {
  int value = 0;
  int digits = 0;
  while (!at_end() && std::isdigit(static_cast<unsigned char>(peek())) && digits < 6) {
    value = value * 10 + (peek() - '0');
    skip();
    ++digits;
  }
  if (digits == 0) return std::nullopt;
  return value;
}

std::optional<uint32_t> TextCursor::code_point() {
  if (at_end()) return std::nullopt;
  const unsigned char lead = static_cast<unsigned char>(text_[at_]);
  const int size = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc2 ? 2 : 0;
  if (size == 0 || at_ + static_cast<size_t>(size) > text_.size()) return std::nullopt;
  uint32_t code = size == 1 ? lead : lead & (0xffU >> (size + 1));
  for (int i = 1; i < size; ++i) {
    const unsigned char c = static_cast<unsigned char>(text_[at_ + static_cast<size_t>(i)]);
    if ((c & 0xc0) != 0x80) return std::nullopt;
    code = code << 6 | (c & 63);
  }
  at_ += static_cast<size_t>(size);
  if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return std::nullopt;
  return code;
}

std::optional<uint32_t> TextCursor::hex(int digits) {
  uint32_t value = 0;
  for (int i = 0; i < digits; ++i) {
    const char c = peek();
    if (!std::isxdigit(static_cast<unsigned char>(c))) return std::nullopt;
    value = value * 16 + static_cast<uint32_t>(std::isdigit(static_cast<unsigned char>(c))
                                                   ? c - '0'
                                                   : (c | 32) - 'a' + 10);
    skip();
  }
  return value;
}

std::optional<uint32_t> TextCursor::escaped_code_point() {
  const char c = peek();
  if (at_end()) return std::nullopt;
  switch (c) {
    case 'n':
      skip();
      return '\n';
    case 'r':
      skip();
      return '\r';
    case 't':
      skip();
      return '\t';
    case 'f':
      skip();
      return '\f';
    case 'v':
      skip();
      return '\v';
    case '0':
      skip();
      return 0U;
    case 'x':
      skip();
      return hex(2);
    case 'U':
      skip();
      return hex(8);
    case 'c': {
      skip();
      const char letter = peek();
      if (!std::isalpha(static_cast<unsigned char>(letter))) return std::nullopt;
      skip();
      return static_cast<uint32_t>(letter & 31);
    }
    case 'u': {
      skip();
      if (!take('{')) return hex(4);
      uint32_t value = 0;
      while (!at_end() && peek() != '}') {
        const auto digit = hex(1);
        if (!digit || value > 0x10ffff) return std::nullopt;
        value = value * 16 + *digit;
      }
      if (!take('}') || value > 0x10ffff) return std::nullopt;
      return value;
    }
    default:
      break;
  }
  if (std::isalnum(static_cast<unsigned char>(c))) return std::nullopt;
  return code_point();
}

}  // namespace freshet::grammar

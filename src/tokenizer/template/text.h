// Strings as Python sees them: sequences of code points, here in UTF-8. Pure functions. Searches
// take linear time for all inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace freshet::jinja {

constexpr size_t kNotFound = std::string_view::npos;

bool is_ascii(std::string_view s);
size_t count_chars(std::string_view s);
// The byte offset of the character at `index`; s.size() if there are fewer characters.
size_t offset_of(std::string_view s, size_t index);
// Calls f(code point, bytes) for each character; each byte that is not valid UTF-8 counts as one
// character.
template <class F>
void each_char(std::string_view s, F&& f);

bool is_space(char32_t c);      // str.isspace
bool is_printable(char32_t c);  // str.isprintable
bool is_alpha(char32_t c);
bool is_digit(char32_t c);  // str.isdecimal
bool is_upper(char32_t c);  // upper or title case
bool is_lower(char32_t c);

size_t find(std::string_view s, std::string_view what, size_t from = 0);
size_t rfind(std::string_view s, std::string_view what);

// Strips `chars`; null strips whitespace.
std::string_view strip(std::string_view s, bool left, bool right, const std::string_view* chars);
std::string upper(std::string_view s);
std::string lower(std::string_view s);
std::string casefold(std::string_view s);
std::string capitalize(std::string_view s);
std::string swapcase(std::string_view s);
std::string title(std::string_view s);  // str.title
// The lines of str.splitlines(), plus an empty one after a final line end.
std::vector<std::string> lines_of(std::string_view s);
void append_repr(std::string& out, std::string_view s);  // with its quotes

}  // namespace freshet::jinja

#include "base/utf8.h"

namespace freshet::jinja {
template <class F>
void each_char(std::string_view s, F&& f) {
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = decode_utf8(s.substr(i, 4));
    f(c.code, s.substr(i, c.size));
    i += c.size;
  }
}
}  // namespace freshet::jinja

#include "tokenizer/template/text.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <utf8proc.h>

#include "tokenizer/template/special_case.h"

namespace freshet::jinja {

bool is_ascii(std::string_view s) {
  uint8_t any = 0;
  for (const char c : s) any |= static_cast<uint8_t>(c);
  return any < 0x80;
}

size_t count_chars(std::string_view s) {
  size_t n = 0;
  each_char(s, [&](char32_t, std::string_view) { ++n; });
  return n;
}

size_t offset_of(std::string_view s, size_t index) {
  size_t i = 0;
  for (; index > 0 && i < s.size(); --index) i += decode_utf8(s.substr(i, 4)).size;
  return i;
}

namespace {
utf8proc_category_t category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}
}  // namespace

bool is_space(char32_t c) {
  return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool is_printable(char32_t c) {
  if (c < 0x7F) return c >= 0x20;
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

bool is_alpha(char32_t c) {
  const auto k = category(c);
  return k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;
}
bool is_digit(char32_t c) {
  return category(c) == UTF8PROC_CATEGORY_ND;
}
bool is_upper(char32_t c) {
  return category(c) == UTF8PROC_CATEGORY_LU || category(c) == UTF8PROC_CATEGORY_LT;
}
bool is_lower(char32_t c) {
  return category(c) == UTF8PROC_CATEGORY_LL;
}

size_t find(std::string_view s, std::string_view what, size_t from) {
  if (from > s.size()) return kNotFound;
  if (what.empty()) return from;
  if (what.size() == 1) return s.find(what[0], from);
  // memmem is linear; string_view::find is quadratic in the worst case.
  const void* p = ::memmem(s.data() + from, s.size() - from, what.data(), what.size());
  return p == nullptr ? kNotFound : static_cast<size_t>(static_cast<const char*>(p) - s.data());
}

size_t rfind(std::string_view s, std::string_view what) {
  const std::string rs(s.rbegin(), s.rend());
  const std::string rwhat(what.rbegin(), what.rend());
  const size_t at = find(rs, rwhat);
  return at == kNotFound ? kNotFound : s.size() - at - what.size();
}

std::string_view strip(std::string_view s, bool left, bool right, const std::string_view* chars) {
  const auto goes = [&](char32_t code, std::string_view bytes) {
    return chars == nullptr ? is_space(code) : find(*chars, bytes) != kNotFound;
  };
  while (left && !s.empty()) {
    const Utf8Char c = decode_utf8(s.substr(0, 4));
    if (!goes(c.code, s.substr(0, c.size))) break;
    s.remove_prefix(c.size);
  }
  while (right && !s.empty()) {
    size_t n = 1;
    while (n < 4 && n < s.size() && (static_cast<uint8_t>(s[s.size() - n]) & 0xC0) == 0x80) ++n;
    const std::string_view last = s.substr(s.size() - n);
    if (!goes(decode_utf8(last).code, last)) break;
    s.remove_suffix(n);
  }
  return s;
}

namespace {

void append_upper(std::string& out, char32_t c) {
  if (const SpecialCase* special = find_special_case(c)) {
    out += special->upper;
  } else {
    append_utf8(out, static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))));
  }
}

void append_title(std::string& out, char32_t c) {
  if (const SpecialCase* special = find_special_case(c)) {
    out += special->title;
  } else {
    append_utf8(out, static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c))));
  }
}

void append_lower(std::string& out, char32_t c) {
  if (c == 0x130) {
    out += "i\xcc\x87";
  } else {
    append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
  }
}

// Case-ignorable characters (marks and the like), skipped when looking for the position of a sigma.
bool is_case_ignorable(char32_t c) {
  const auto category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
  return category == UTF8PROC_CATEGORY_MN || category == UTF8PROC_CATEGORY_ME ||
         category == UTF8PROC_CATEGORY_CF || category == UTF8PROC_CATEGORY_LM ||
         category == UTF8PROC_CATEGORY_SK || c == '\'' || c == '.' || c == ':' || c == 0xB7 ||
         c == 0x2019;
}

// The lower case of a capital sigma in `s` at `at`: it has a special form at the end of a word.
std::string_view lower_sigma(std::string_view s, size_t at) {
  bool before = false, after = false, done = false;
  each_char(s.substr(0, at), [&](char32_t c, std::string_view) {
    if (!is_case_ignorable(c)) before = is_upper(c) || is_lower(c);
  });
  each_char(s.substr(at + 2), [&](char32_t c, std::string_view) {
    if (done || is_case_ignorable(c)) return;
    after = is_upper(c) || is_lower(c);
    done = true;
  });
  return before && !after ? "\u03C2" : "\u03C3";
}

// Converts the characters of a text to lower case, one by one.
class Lowering {
 public:
  explicit Lowering(std::string_view s) : s_(s) {}
  // `bytes`: the position of c in the text.
  void append(std::string& out, char32_t c, std::string_view bytes) {
    if (c == 0x3A3 && ++sigmas_ < 64) {  // each one scans the whole text
      out += lower_sigma(s_, static_cast<size_t>(bytes.data() - s_.data()));
    } else {
      append_lower(out, c);
    }
  }

 private:
  std::string_view s_;
  int sigmas_ = 0;
};

}  // namespace

std::string upper(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  each_char(s, [&](char32_t c, std::string_view) { append_upper(out, c); });
  return out;
}

std::string lower(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  Lowering lowering(s);
  each_char(s, [&](char32_t c, std::string_view bytes) { lowering.append(out, c, bytes); });
  return out;
}

std::string casefold(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  each_char(s, [&](char32_t c, std::string_view) {
    utf8proc_int32_t folded[8];
    int bound = UTF8PROC_BOUNDCLASS_START;
    const auto n = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(c), folded, 8,
                                           UTF8PROC_CASEFOLD, &bound);
    for (utf8proc_ssize_t i = 0; i < n && i < 8; ++i)
      append_utf8(out, static_cast<char32_t>(folded[i]));
  });
  return out;
}

std::string capitalize(std::string_view s) {
  std::string out;
  Lowering lowering(s);
  each_char(s, [&](char32_t c, std::string_view bytes) {
    if (out.empty()) {
      append_title(out, c);
    } else {
      lowering.append(out, c, bytes);
    }
  });
  return out;
}

std::string swapcase(std::string_view s) {
  std::string out;
  Lowering lowering(s);
  each_char(s, [&](char32_t c, std::string_view bytes) {
    if (is_upper(c)) {
      lowering.append(out, c, bytes);
    } else {
      append_upper(out, c);
    }
  });
  return out;
}

std::string title(std::string_view s) {
  std::string out;
  bool in_word = false;
  Lowering lowering(s);
  each_char(s, [&](char32_t c, std::string_view bytes) {
    if (in_word) {
      lowering.append(out, c, bytes);
    } else {
      append_title(out, c);
    }
    in_word = is_upper(c) || is_lower(c);
  });
  return out;
}

std::vector<std::string> lines_of(std::string_view s) {
  std::vector<std::string> lines(1);
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = decode_utf8(s.substr(i, 4));
    const bool is_break = (c.code >= 10 && c.code <= 13) || (c.code >= 28 && c.code <= 30) ||
                          c.code == 0x85 || c.code == 0x2028 || c.code == 0x2029;
    if (is_break) {
      lines.emplace_back();
    } else {
      lines.back() += s.substr(i, c.size);
    }
    i += c.size;
    if (c.code == '\r' && i < s.size() && s[i] == '\n') ++i;
  }
  return lines;
}

void append_repr(std::string& out, std::string_view s) {
  const bool single = s.find('\'') != kNotFound;
  const char quote = single && s.find('"') == kNotFound ? '"' : '\'';
  out += quote;
  each_char(s, [&](char32_t c, std::string_view bytes) {
    if (c == '\\' || c == static_cast<char32_t>(quote)) {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      out += bytes;
    } else if (c < 0x100) {
      out += fmt::format("\\x{:02x}", static_cast<uint32_t>(c));
    } else if (c < 0x10000) {
      out += fmt::format("\\u{:04x}", static_cast<uint32_t>(c));
    } else {
      out += fmt::format("\\U{:08x}", static_cast<uint32_t>(c));
    }
  });
  out += quote;
}

}  // namespace freshet::jinja

#include "tokenizer/template/lexer.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/json.h"
#include "base/utf8.h"
#include "tokenizer/template/big_int.h"
#include "tokenizer/template/text.h"
#include "tokenizer/template/value.h"

namespace freshet::jinja {
namespace {

bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<uint8_t>(c) >= 0x80;
}
bool is_digit_char(char c) {
  return c >= '0' && c <= '9';
}

// Converts all newlines to
//  and drops one at the end.
std::string normalize(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : text_(normalize(source)), s_(text_) {}

  std::vector<Token> run() {
    try {
      while (at_ < s_.size()) root();
    } catch (Error& e) {
      if (e.line == 0) e.line = line_;
      throw;
    }
    add(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void add(TokenType type, std::string_view text) {
    tokens_.push_back({type, line_, std::string(text), 0, 0});
  }

  // Advances to `end` and counts lines.
  void advance(size_t end) {
    line_ += static_cast<int>(std::count(s_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         s_.begin() + static_cast<std::ptrdiff_t>(end), '\n'));
    at_ = end;
  }

  char peek(size_t i) const { return i < s_.size() ? s_[i] : '\0'; }
  bool starts(size_t i, std::string_view what) const {
    return s_.substr(std::min(i, s_.size()), what.size()) == what;
  }

  size_t skip_space(size_t i) const {
    while (i < s_.size()) {
      const Utf8Char c = decode_utf8(s_.substr(i, 4));
      if (!is_space(c.code)) break;
      i += c.size;
    }
    return i;
  }

  // Adds the text up to `end`, stripped as the following tag requires.
  void data(size_t end, char sign, bool is_variable) {
    std::string_view text = s_.substr(at_, end - at_);
    if (sign == '-') {
      text = strip(text, false, true, nullptr);
    } else if (sign != '+' && !is_variable) {
      const size_t newline = text.rfind('\n');
      const size_t start = newline == kNotFound ? 0 : newline + 1;
      const bool own_line = start > 0 || line_starting_;
      if (own_line && strip(text.substr(start), true, false, nullptr).empty()) {
        text = text.substr(0, start);
      }
    }
    if (!text.empty()) add(TokenType::kData, text);
    advance(end);
  }

  // Skips the end of a tag at `end` (including its sign) and the whitespace removed with it.
  void finish_tag(size_t end, char sign, bool trims_newline) {
    if (sign == '-') {
      end = skip_space(end);
    } else if (sign != '+' && trims_newline && peek(end) == '\n') {
      ++end;
    }
    advance(end);
    line_starting_ = end > 0 && s_[end - 1] == '\n';
  }

  char sign_at(size_t i) const { return peek(i) == '-' || peek(i) == '+' ? peek(i) : '\0'; }

  void root() {
    size_t tag = at_;
    while (true) {
      tag = s_.find('{', tag);
      if (tag == kNotFound) {
        add(TokenType::kData, s_.substr(at_));
        advance(s_.size());
        return;
      }
      const char next = peek(tag + 1);
      if (next == '{' || next == '%' || next == '#') break;
      ++tag;
    }
    const char kind = s_[tag + 1];
    const char sign = sign_at(tag + 2);
    data(tag, sign, kind == '{');
    const size_t inside = tag + (sign == '\0' ? 2 : 3);
    if (kind == '#') {
      comment(inside);
    } else if (const auto raw_end = kind == '%' ? word_tag(tag, "raw") : std::nullopt) {
      raw(*raw_end);
    } else {
      add(kind == '%' ? TokenType::kBlockBegin : TokenType::kVariableBegin, s_.substr(tag, 2));
      advance(inside);
      expression(kind == '%');
    }
  }

  void comment(size_t start) {
    const size_t end = s_.find("#}", start);
    if (end == kNotFound) fail("a comment is not closed: \"#}}\" is missing");
    const char sign = end > start ? sign_at(end - 1) : '\0';
    finish_tag(end + 2, sign, true);
  }

  struct WordTag {
    size_t end;
    char open_sign;
    char close_sign;
  };

  // Matches the tag {% word %} at `tag`, with any whitespace control.
  std::optional<WordTag> word_tag(size_t tag, std::string_view word) const {
    if (!starts(tag, "{%")) return std::nullopt;
    const char open_sign = sign_at(tag + 2);
    size_t i = skip_space(tag + (open_sign == '\0' ? 2 : 3));
    if (!starts(i, word)) return std::nullopt;
    i = skip_space(i + word.size());
    const char close_sign = sign_at(i);
    if (close_sign != '\0') ++i;
    if (!starts(i, "%}")) return std::nullopt;
    return WordTag{i + 2, open_sign, close_sign};
  }

  void raw(const WordTag& open) {
    finish_tag(open.end, open.close_sign, false);
    if (at_ == s_.size()) return;  // as in Jinja: if it is empty, it need not be closed
    for (size_t tag = at_;; ++tag) {
      tag = s_.find("{%", tag);
      if (tag == kNotFound) fail("{{% raw %}} is not closed");
      if (const auto close = word_tag(tag, "endraw")) {
        data(tag, close->open_sign, false);
        finish_tag(close->end, close->close_sign, true);
        return;
      }
    }
  }

  // Tokens up to the end of the tag.
  void expression(bool is_block) {
    const std::string_view closer = is_block ? "%}" : "}}";
    std::string open;  // the open brackets
    while (true) {
      if (open.empty()) {
        const char sign = sign_at(at_);
        const bool signed_end =
            sign != '\0' && (is_block || sign == '-') && starts(at_ + 1, closer);
        if (signed_end || starts(at_, closer)) {
          add(is_block ? TokenType::kBlockEnd : TokenType::kVariableEnd, closer);
          finish_tag(at_ + (signed_end ? 3 : 2), signed_end ? sign : '\0', is_block);
          return;
        }
      }
      if (at_ >= s_.size()) fail("a tag is not closed: \"{}\" is missing", closer);
      const size_t after_space = skip_space(at_);
      if (after_space > at_) {
        advance(after_space);
      } else if (is_digit_char(s_[at_])) {
        number();
      } else if (is_name_start(s_[at_])) {
        size_t end = at_;
        while (end < s_.size() && (is_name_start(s_[end]) || is_digit_char(s_[end]))) ++end;
        add(TokenType::kName, s_.substr(at_, end - at_));
        advance(end);
      } else if (s_[at_] == '"' || s_[at_] == '\'') {
        string();
      } else {
        symbol(open);
      }
    }
  }

  void symbol(std::string& open) {
    static constexpr std::string_view kTwo[] = {"//", "**", "==", "!=", ">=", "<="};
    for (const std::string_view two : kTwo) {
      if (starts(at_, two)) {
        add(TokenType::kOperator, two);
        return advance(at_ + 2);
      }
    }
    const char c = s_[at_];
    static constexpr std::string_view kOne = "+-/*%~[](){}><=.:|,;";
    if (kOne.find(c) == kNotFound) fail("unexpected character '{}'", c);
    if (c == '(' || c == '[' || c == '{') {
      open += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (open.empty()) fail("unexpected '{}'", c);
      if (open.back() != c) fail("unexpected '{}', expected '{}'", c, open.back());
      open.pop_back();
    }
    add(TokenType::kOperator, s_.substr(at_, 1));
    advance(at_ + 1);
  }

  // The end of a run of digits that starts at `i`, with single underscores between them.
  template <class IsDigit>
  size_t digits(size_t i, IsDigit is_digit) const {
    while (is_digit(peek(i)) || (peek(i) == '_' && is_digit(peek(i + 1)))) ++i;
    return i;
  }

  void number() {
    const char prefix = static_cast<char>(peek(at_ + 1) | 0x20);
    int base = 10;
    if (s_[at_] == '0') base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
    const auto is_digit = [base](char c) {
      const int lower = c | 0x20;
      const int value = is_digit_char(c)               ? c - '0'
                        : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10
                                                       : 99;
      return value < base;
    };
    const size_t start = base == 10 ? at_ : at_ + 2;
    size_t end = digits(start, is_digit);
    bool is_float = false;
    // After a dot, as in x.0.1, a second dot does not start a fraction.
    const bool after_dot = at_ > 0 && s_[at_ - 1] == '.';
    if (base == 10 && !after_dot) {
      if (peek(end) == '.' && is_digit_char(peek(end + 1))) {
        end = digits(end + 1, is_digit_char);
        is_float = true;
      }
      size_t e = end;
      if (peek(e) == 'e' || peek(e) == 'E') {
        ++e;
        if (peek(e) == '+' || peek(e) == '-') ++e;
        if (is_digit_char(peek(e))) {
          end = digits(e, is_digit_char);
          is_float = true;
        }
      }
    }
    std::string text(s_.substr(start, end - start));
    std::erase(text, '_');
    Token token{is_float ? TokenType::kFloat : TokenType::kInteger, line_, "", 0, 0};
    const char* last = text.data() + text.size();
    const auto result = is_float ? std::from_chars(text.data(), last, token.number)
                                 : std::from_chars(text.data(), last, token.integer, base);
    if (is_float && result.ec == std::errc::result_out_of_range) {
      token.number = json::Value::number_from_text(text).as_double();
    } else if (result.ec == std::errc::result_out_of_range && result.ptr == last) {
      token.text = BigInt::parse(text, base).value().text();
    } else if (result.ec != std::errc() || result.ptr != last) {
      fail("the number {} cannot be read", s_.substr(at_, end - at_));
    }
    tokens_.push_back(std::move(token));
    advance(end);
  }

  void string() {
    const char quote = s_[at_];
    size_t i = at_ + 1;
    std::string out;
    while (true) {
      if (i >= s_.size()) fail("a string is not closed");
      if (s_[i] == quote) break;
      if (s_[i] == '\\') {
        i = escape(i + 1, out);
      } else {
        out += s_[i++];
      }
    }
    add(TokenType::kString, out);
    advance(i + 1);
  }

  // Reads the escape whose letter is at `i`; returns the offset after it.
  size_t escape(size_t i, std::string& out) {
    static constexpr std::string_view kLetters = "\\'\"abfnrtv";
    static constexpr std::string_view kMeanings = "\\'\"\a\b\f\n\r\t\v";
    const char c = peek(i);
    if (i >= s_.size()) fail("a string is not closed");
    if (c == '\n') return i + 1;
    if (const size_t k = kLetters.find(c); k != kNotFound) {
      out += kMeanings[k];
      return i + 1;
    }
    if (c >= '0' && c <= '7') {
      uint32_t code = 0;
      size_t end = i;
      for (; end < i + 3 && peek(end) >= '0' && peek(end) <= '7'; ++end) {
        code = code * 8 + static_cast<uint32_t>(peek(end) - '0');
      }
      append_utf8(out, code);
      return end;
    }
    if (c == 'x' || c == 'u' || c == 'U') return hex_escape(i, out);
    if (c == 'N') fail("\\N escapes are not supported: write \\u and the code");
    out += '\\';  // an unknown escape stays as it is
    return i;
  }

  size_t hex_escape(size_t i, std::string& out) {
    uint32_t code = hex(i);
    size_t end = i + 1 + hex_size(s_[i]);
    const bool high = code >= 0xD800 && code <= 0xDBFF;
    if (high && peek(end) == '\\' && peek(end + 1) == 'u') {
      const uint32_t low = hex(end + 1);
      if (low >= 0xDC00 && low <= 0xDFFF) {
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        end += 6;
      }
    }
    if (code > 0x10FFFF) fail("illegal Unicode character in a string");
    append_utf8(out, code >= 0xD800 && code <= 0xDFFF ? 0xFFFD : code);
    return end;
  }

  static size_t hex_size(char letter) { return letter == 'x' ? 2 : letter == 'u' ? 4 : 8; }

  // The code point after the letter at `i`.
  uint32_t hex(size_t i) const {
    const std::string_view text = s_.substr(i + 1, hex_size(s_[i]));
    uint32_t code = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), code, 16);
    if (error != std::errc() || end != text.data() + hex_size(s_[i])) {
      fail("\\{} in a string needs {} hexadecimal digits", s_[i], hex_size(s_[i]));
    }
    return code;
  }

  std::string text_;
  std::string_view s_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  return Lexer(source).run();
}

}  // namespace freshet::jinja

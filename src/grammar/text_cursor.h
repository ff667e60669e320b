// A position in a text being parsed: the primitives shared by the grammar front ends.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/status.h"

namespace freshet::grammar {

class TextCursor {
 public:
  explicit TextCursor(std::string_view text) : text_(text) {}

  bool at_end() const { return at_ >= text_.size(); }
  char peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }
  void skip() { ++at_; }
  size_t position() const { return at_; }
  void seek(size_t position) { at_ = position; }
  bool take(char c) {
    if (at_end() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  bool take_word(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }
  std::string_view since(size_t begin) const { return text_.substr(begin, at_ - begin); }

  // A decimal number of at most six digits.
  std::optional<int> number();
  // The next UTF-8 character; nullopt if it is malformed.
  std::optional<uint32_t> code_point();
  // The character of an escape, after the backslash: n r t f v 0, xHH, uHHHH, u{H...}, UHHHHHHHH,
  // cX, or a character itself.
  std::optional<uint32_t> escaped_code_point();

  // "<message> at byte N"
  Status error(std::string_view message) const {
    return invalid_argument("{} at byte {}", message, at_);
  }
  // "<what> not supported, at byte N"
  Status not_supported(std::string_view what) const {
    return unsupported("{} not supported, at byte {}", what, at_);
  }

 private:
  std::optional<uint32_t> hex(int digits);

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace freshet::grammar

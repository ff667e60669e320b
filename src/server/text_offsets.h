// Where tokens begin in the text that is made of them, in characters.
//
// Tokens may end within a character: the next one then begins in the character that its first byte
// belongs to. Bytes that are no UTF-8 count as the U+FFFD that texts have in their place. One
// counter a text; not synchronised.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace freshet::server {

class TextOffsets {
 public:
  // Characters that are complete: the next byte belongs to the one behind them.
  int64_t complete() const { return complete_; }
  // The beginning of a character whose end has not come yet.
  const std::string& pending() const { return pending_; }

  void add(std::string_view bytes) {
    pending_ += bytes;
    size_t at = 0;
    while (at < pending_.size()) {
      const std::string_view rest = std::string_view(pending_).substr(at);
      const Utf8Char c = decode_utf8(rest);
      if (!c.valid && c.size == rest.size() && may_go_on(rest)) break;
      ++complete_;
      at += c.size;
    }
    pending_.erase(0, at);
  }

 private:
  static bool may_go_on(std::string_view rest) {
    const auto lead = static_cast<uint8_t>(rest[0]);
    const size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    return lead >= 0xC2 && lead <= 0xF4 && rest.size() < size;
  }

  int64_t complete_ = 0;
  std::string pending_;
};

// The text of a prompt and of what follows it, where a character may begin in the one and end in
// the other: `prompt` is the prompt's text and `pending` its last bytes that are no whole character
// (shown as one U+FFFD), `answer` is the text of `answer_bytes` alone.
std::string joined_text(std::string prompt, std::string_view pending, std::string_view answer,
                        std::string_view answer_bytes);

}  // namespace freshet::server

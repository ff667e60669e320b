// Character offsets of tokens in the text that they form.
//
// A token may end within a character. The next token then begins at the character that contains its
// first byte. Invalid UTF-8 counts as the U+FFFD that replaces it in texts. One counter per text;
// not synchronised.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace freshet::server {

class TextOffsets {
 public:
  // The number of complete characters; the next byte belongs to the character after them.
  int64_t complete() const { return complete_; }
  // The first bytes of an incomplete character.
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

// Joins the texts of a prompt and its answer; a character may begin in the prompt and end in the
// answer. `pending`: the last bytes of the prompt if they are an incomplete character (one U+FFFD
// in `prompt`). `answer`: the text of `answer_bytes` decoded separately.
std::string joined_text(std::string prompt, std::string_view pending, std::string_view answer,
                        std::string_view answer_bytes);

}  // namespace freshet::server

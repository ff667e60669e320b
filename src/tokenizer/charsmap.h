// SentencePiece's precompiled character map: replacements of byte sequences, stored in a double
// array (Darts layout: size of the array in bytes as u32, the array, then zero-terminated
// replacement strings).
//
// Immutable. The array comes from a file and is not trusted: every step is checked against its
// size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::tokenizer {

class Charsmap {
 public:
  static Result<Charsmap> parse(std::string_view bytes);

  struct Match {
    size_t size;  // number of bytes replaced
    std::string_view replacement;
  };
  std::optional<Match> longest(std::string_view text) const { return match(text, true); }
  std::optional<Match> shortest(std::string_view text) const { return match(text, false); }

 private:
  std::optional<Match> match(std::string_view text, bool longest) const;

  std::vector<uint32_t> units_;
  std::string replacements_;
};

}  // namespace freshet::tokenizer

// Hand-written scanners that are equivalent to the split patterns of most vocabularies.
//
// A scanner cuts a text into words that cover all of it, in time linear in the text (on runs of
// white space, backtracking engines take quadratic time for these patterns). Pure; texts are valid
// UTF-8. Tested against PCRE2 on random texts.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "tokenizer/unicode.h"

namespace freshet::tokenizer {

struct ScanRules {
  enum class Words { kGpt2, kCl100k, kO200k };
  enum class Contractions { kNone, kExact, kAnyAsciiCase, kAnyCase };
  Words words = Words::kGpt2;
  Contractions contractions = Contractions::kExact;  // 's 't 're 've 'm 'll 'd
  uint32_t max_digits = 0;                           // longest piece of a number; 0: no limit
  bool marks = false;                                // marks are letters (kCl100k)
  bool slash = false;  // punctuation absorbs following '/' as well as line ends
};

// The rules equivalent to a regular expression; nullopt if there are none.
std::optional<ScanRules> rules_for_pattern(std::string_view pattern);

// The regular expression equivalent to the rules; for tests.
std::string pattern_for_rules(const ScanRules& rules);

// The end of the word that begins at `begin`. REQUIRES: begin < text.size().
size_t scan_word(const ScanRules& rules, std::string_view text, size_t begin);

}  // namespace freshet::tokenizer

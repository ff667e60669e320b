// A regular expression over UTF-8, matched by PCRE2 (compiled just in time).
//
// Patterns come from vocabularies and are written for other engines: compile() translates what
// differs (\s, \w, \h, \u, nested classes and class intersection, anchors). Immutable; matching is
// safe from many threads. Texts must be valid UTF-8. Every match is bounded by a limit on steps;
// one that runs into it ends the search, as if nothing more matched.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/thread_pool.h"

namespace freshet::tokenizer {

// Whose syntax a pattern is in: Hugging Face's (Oniguruma: ^ and $ match at every line) or
// tiktoken's (Rust: $ only at the very end).
enum class RegexDialect { kOniguruma, kRust };

class Regex {
 public:
  static Result<std::shared_ptr<const Regex>> compile(std::string_view pattern,
                                                      RegexDialect dialect);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Calls f(begin, end) for each match, left to right, without overlap; empty matches included.
  void for_each_match(std::string_view text, FunctionRef<void(size_t, size_t)> f) const;

 private:
  struct Impl;
  explicit Regex(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The pattern in PCRE2's syntax; visible for tests.
std::string translate_pattern(std::string_view pattern, RegexDialect dialect);

}  // namespace freshet::tokenizer

// A regular expression over UTF-8, matched by PCRE2 (JIT-compiled).
//
// Patterns come from vocabularies and are written for other engines. compile() translates the
// differences (\s, \w, \h, \u, nested classes and class intersection, anchors). Immutable; matching
// is safe from many threads. Texts must be valid UTF-8. Every match has a step limit; a match that
// reaches it ends the search, as if there were no more matches.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/thread_pool.h"

namespace freshet::tokenizer {

// The syntax of a pattern: Hugging Face's (Oniguruma: ^ and $ match at every line) or tiktoken's
// (Rust: $ matches only at the very end).
enum class RegexDialect { kOniguruma, kRust };

class Regex {
 public:
  static Result<std::shared_ptr<const Regex>> compile(std::string_view pattern,
                                                      RegexDialect dialect);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Calls f(begin, end) for each match, left to right, without overlap; includes empty matches.
  void for_each_match(std::string_view text, FunctionRef<void(size_t, size_t)> f) const;

 private:
  struct Impl;
  explicit Regex(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The pattern translated to PCRE2 syntax; visible for tests.
std::string translate_pattern(std::string_view pattern, RegexDialect dialect);

}  // namespace freshet::tokenizer

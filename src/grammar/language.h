// Sets of strings as deterministic automata over code points, with the algebra that schemas need.
//
// Patterns, lengths, formats, excluded names and number ranges all become Languages, so several
// keywords on one text become an intersection. Every state can reach acceptance (dead states are
// removed). Immutable values; operations fail instead of growing past kMaxStates.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "grammar/expression.h"

namespace freshet::grammar {

class Language {
 public:
  static constexpr size_t kMaxStates = 50'000;
  struct Edge {
    uint32_t first = 0;
    uint32_t last = 0;
    int32_t target = -1;
  };
  struct State {
    std::vector<Edge> edges;  // ascending, disjoint
    bool accepts = false;
  };

  // REQUIRES: no rule references in `e`.
  static Result<Language> from(const Expression& e);
  // Strings that contain a match of an expression from parse_search_regex().
  static Result<Language> search(const Expression& e);
  static Language of_length(int64_t min, int64_t max);  // max < 0: unbounded
  static Language of(const std::vector<std::string>& strings);
  static Language from_states(std::vector<State> states);  // state 0 is the start

  bool empty() const { return states_.empty(); }
  bool contains(std::string_view utf8) const;
  const std::vector<State>& states() const { return states_; }

  friend Result<Language> intersect(const Language& a, const Language& b);
  friend Result<Language> subtract(const Language& a, const Language& b);

 private:
  std::vector<State> states_;
};

Result<Language> intersect(const Language& a, const Language& b);
Result<Language> subtract(const Language& a, const Language& b);

// The language as part of a grammar: unchanged, or with each character spelled as inside a JSON
// string (unescaped where that is allowed).
Expression language_text(Language language);
Expression language_in_json_string(Language language);

}  // namespace freshet::grammar

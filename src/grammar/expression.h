// The common form of all grammars, whatever language they were written in.
//
// An Expression is a tree over Unicode code points: literals, classes, sequences, alternatives,
// bounded and unbounded repetition, and references to rules. RuleSet names the rules; rule 0 is the
// start. Values; not synchronised. automaton.h turns them into an executable form.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace freshet::grammar {

struct CodeRange {
  uint32_t first = 0;
  uint32_t last = 0;
};
inline constexpr uint32_t kMaxCodePoint = 0x10ffff;
// Anchors match these in expressions for Language::search(): the two ends of the text.
inline constexpr uint32_t kTextBegin = kMaxCodePoint + 1;
inline constexpr uint32_t kTextEnd = kMaxCodePoint + 2;

class Language;  // language.h

// Sorted, disjoint ranges without surrogates; `negated` gives the complement.
std::vector<CodeRange> normalize_class(std::vector<CodeRange> ranges, bool negated);

struct Expression {
  enum class Kind { kLiteral, kClass, kSequence, kChoice, kRepeat, kRule, kLanguage };
  Kind kind = Kind::kSequence;
  std::string literal;                       // kLiteral: bytes
  std::vector<CodeRange> ranges;             // kClass: normalised
  std::vector<Expression> children;          // kSequence, kChoice, kRepeat (one)
  int min = 0;                               // kRepeat
  int max = -1;                              // kRepeat; -1: unbounded
  int rule = 0;                              // kRule
  std::shared_ptr<const Language> language;  // kLanguage
  bool in_json_string = false;               // kLanguage: spelled as inside a JSON string
};

Expression literal(std::string_view bytes);
Expression char_class(std::vector<CodeRange> ranges, bool negated = false);
Expression sequence(std::vector<Expression> parts);
Expression choice(std::vector<Expression> parts);
Expression repeat(Expression e, int min, int max);
Expression optional(Expression e);
Expression rule_ref(int rule);
inline Expression empty() {
  return sequence({});
}
// The only text that `e` matches, if that is easy to see; nullopt otherwise.
std::optional<std::string> only_text(const Expression& e);
// Matches nothing at all.
inline Expression never() {
  return choice({});
}

class RuleSet {
 public:
  // Rule 0 exists from the start, empty.
  RuleSet();
  int add(std::string name);  // declares a rule to be defined later
  int add(std::string name, Expression body);
  int find_or_add(const std::string& name);
  void define(int rule, Expression body);
  bool defined(int rule) const { return rules_[static_cast<size_t>(rule)].defined; }
  const std::string& name(int rule) const { return rules_[static_cast<size_t>(rule)].name; }
  const Expression& body(int rule) const { return rules_[static_cast<size_t>(rule)].body; }
  int size() const { return static_cast<int>(rules_.size()); }

 private:
  struct Rule {
    std::string name;
    Expression body;
    bool defined = false;
  };
  std::vector<Rule> rules_;
  std::unordered_map<std::string, int> by_name_;
};

// Front ends. Errors give the position and the problem. All limit depth and size.
Result<Expression> parse_regex(std::string_view pattern);  // whole-string match, ECMAScript-like
Result<Expression> parse_search_regex(std::string_view pattern);  // for Language::search()
Result<RuleSet> parse_ebnf(std::string_view text);  // GBNF: root ::= "a" [b-z]* | other
Expression quoted_json(std::string_view text);      // the JSON string of `text`, plainest spelling

}  // namespace freshet::grammar

// GBNF, the grammar notation of llama.cpp (also read by XGrammar): rules `name ::= body`, string
// literals, [classes], groups, |, * + ? {m} {m,} {m,n}, '.', # comments. The rule named root is the
// start. White space, newlines and comments may stand between any two items, also before a
// repetition; the body of a rule ends where the next `name ::=` begins. References to tokens
// (<think>, <[1000]>) are refused: these grammars consist of characters.
#include <algorithm>
#include <cctype>

#include <fmt/format.h>

#include "base/utf8.h"
#include "grammar/expression.h"
#include "grammar/text_cursor.h"

namespace freshet::grammar {
namespace {

constexpr int kMaxDepth = 128;
constexpr int kMaxRepeat = 10'000;

bool is_name_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
}

class EbnfParser {
 public:
  explicit EbnfParser(std::string_view text) : text_(text), in_(text) {}

  Result<RuleSet> parse() {
    space();
    while (!in_.at_end()) {
      const size_t begin = in_.position();
      const std::string name = rule_name();
      if (name.empty()) return error("expected the name of a rule");
      space();
      if (!in_.take_word("::=")) return error("expected '::='");
      const int rule = rule_named(name, begin);
      if (rules_.defined(rule))
        return error_at(begin, fmt::format("rule '{}' is defined twice", name));
      FRESHET_ASSIGN_OR_RETURN(Expression body, alternatives(0));
      rules_.define(rule, std::move(body));
      space();
      if (!in_.at_end() && !is_name_char(in_.peek()))
        return error(in_.peek() == ')' ? "a ')' without a matching '('"
                                       : "expected the name of a rule");
    }
    if (!rules_.defined(0)) return invalid_argument("rule 'root' is missing");
    for (int rule = 0; rule < rules_.size(); ++rule) {
      if (rules_.defined(rule)) continue;
      return error_at(first_use_[static_cast<size_t>(rule)],
                      fmt::format("rule '{}' is used but not defined", rules_.name(rule)));
    }
    return std::move(rules_);
  }

 private:
  // Lines and columns count from 1; columns are in characters.
  Status error_at(size_t position, std::string_view message) const {
    const std::string_view before = text_.substr(0, position);
    const size_t line_begin = before.rfind('\n') + 1;  // npos + 1 is 0
    const auto column =
        std::ranges::count_if(before.substr(line_begin), [](char c) { return (c & 0xC0) != 0x80; });
    return invalid_argument("line {}, column {}: {}", 1 + std::ranges::count(before, '\n'),
                            column + 1, message);
  }
  Status error(std::string_view message) const { return error_at(in_.position(), message); }

  void space() {
    for (;;) {
      while (!in_.at_end() && std::isspace(static_cast<unsigned char>(in_.peek()))) in_.skip();
      if (in_.peek() != '#') return;
      while (!in_.at_end() && in_.peek() != '\n' && in_.peek() != '\r') in_.skip();
    }
  }

  std::string rule_name() {
    const size_t begin = in_.position();
    while (is_name_char(in_.peek())) in_.skip();
    return std::string(in_.since(begin));
  }

  int rule_named(const std::string& name, size_t position) {
    const int rule = rules_.find_or_add(name);
    if (static_cast<size_t>(rule) >= first_use_.size())
      first_use_.resize(static_cast<size_t>(rule) + 1, position);
    return rule;
  }

  // Whether `name ::=` begins here, that is, the next rule starts and this one ends.
  bool at_next_rule() {
    const size_t begin = in_.position();
    const bool named = !rule_name().empty();
    space();
    const bool found = named && in_.take_word("::=");
    in_.seek(begin);
    return found;
  }

  Result<Expression> alternatives(int depth) {
    if (depth > kMaxDepth) return error("groups are nested too deeply");
    std::vector<Expression> parts;
    do {
      FRESHET_ASSIGN_OR_RETURN(Expression e, terms(depth));
      parts.push_back(std::move(e));
    } while (in_.take('|'));
    return choice(std::move(parts));
  }

  Result<Expression> terms(int depth) {
    std::vector<Expression> parts;
    for (;;) {
      space();
      const char c = in_.peek();
      if (in_.at_end() || c == '|' || c == ')' || (is_name_char(c) && at_next_rule())) break;
      FRESHET_ASSIGN_OR_RETURN(Expression e, atom(depth));
      FRESHET_ASSIGN_OR_RETURN(e, quantified(std::move(e)));
      parts.push_back(std::move(e));
    }
    return sequence(std::move(parts));
  }

  Result<Expression> quantified(Expression e) {
    for (;;) {
      space();
      if (in_.take('*')) {
        e = repeat(std::move(e), 0, -1);
      } else if (in_.take('+')) {
        e = repeat(std::move(e), 1, -1);
      } else if (in_.take('?')) {
        e = repeat(std::move(e), 0, 1);
      } else if (in_.take('{')) {
        FRESHET_ASSIGN_OR_RETURN(e, counted(std::move(e)));
      } else {
        return e;
      }
    }
  }

  // After the brace: m}, m,} or m,n}.
  Result<Expression> counted(Expression e) {
    space();
    const size_t begin = in_.position();
    const auto low = in_.number();
    if (!low) return error("expected a number, as in {2}, {2,} or {0,2}");
    int high = *low;
    space();
    if (in_.take(',')) {
      space();
      high = in_.number().value_or(-1);
      space();
    }
    const bool long_number = std::isdigit(static_cast<unsigned char>(in_.peek())) != 0;
    if (long_number || *low > kMaxRepeat || high > kMaxRepeat)
      return error_at(begin, fmt::format("a repetition of more than {}", kMaxRepeat));
    if (!in_.take('}')) return error("expected '}'");
    if (high >= 0 && high < *low) return error_at(begin, "repetition bounds out of order");
    return repeat(std::move(e), *low, high);
  }

  Result<Expression> atom(int depth) {
    const size_t begin = in_.position();
    if (in_.take('"')) return string(begin);
    if (in_.take('[')) return bracket(begin);
    if (in_.take('.')) return char_class({}, true);
    if (in_.take('(')) {
      FRESHET_ASSIGN_OR_RETURN(Expression e, alternatives(depth + 1));
      if (!in_.take(')')) return error("missing ')'");
      return e;
    }
    const char c = in_.peek();
    if (c == '*' || c == '+' || c == '?' || c == '{') return error("nothing to repeat");
    if (c == '<' || c == '!')
      return error("references to tokens are not supported: write characters");
    const std::string name = rule_name();
    if (name.empty()) return error("expected a literal, a class, a group or a rule");
    return rule_ref(rule_named(name, begin));
  }

  Result<uint32_t> character() {
    const size_t begin = in_.position();
    const auto code = in_.take('\\') ? in_.escaped_code_point() : in_.code_point();
    if (!code || *code > kMaxCodePoint) return error_at(begin, "an invalid character or escape");
    return *code;
  }

  Result<Expression> string(size_t begin) {
    std::string bytes;
    while (!in_.take('"')) {
      if (in_.at_end()) return error_at(begin, "missing '\"' at the end of this literal");
      const size_t at = in_.position();
      FRESHET_ASSIGN_OR_RETURN(const uint32_t code, character());
      if (code >= 0xd800 && code < 0xe000)
        return error_at(at, "half of a surrogate pair: write \\U and eight digits");
      append_utf8(bytes, code);
    }
    return literal(bytes);
  }

  Result<Expression> bracket(size_t begin) {
    const bool negated = in_.take('^');
    std::vector<CodeRange> ranges;
    while (!in_.take(']')) {
      if (in_.at_end()) return error_at(begin, "missing ']' at the end of this class");
      const size_t at = in_.position();
      FRESHET_ASSIGN_OR_RETURN(const uint32_t low, character());
      uint32_t high = low;
      if (in_.peek() == '-' && in_.peek(1) != ']') {
        in_.skip();
        FRESHET_ASSIGN_OR_RETURN(high, character());
        if (high < low) return error_at(at, "a class range out of order");
      }
      ranges.push_back({low, high});
    }
    return char_class(std::move(ranges), negated);
  }

  const std::string_view text_;
  TextCursor in_;
  RuleSet rules_;
  std::vector<size_t> first_use_ = {0};  // position of each rule in the text
};

}  // namespace

Result<RuleSet> parse_ebnf(std::string_view text) {
  auto rules = EbnfParser(text).parse();
  if (!rules.ok()) return rules.status().with_context("grammar");
  return rules;
}

}  // namespace freshet::grammar

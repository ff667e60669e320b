// GBNF, the grammar notation of llama.cpp (also read by XGrammar): rules `name ::= body`, string
// literals, [classes], groups, |, * + ? {m,n}, '.', # comments. The rule named root is the start. A
// rule's body ends where the next `name ::=` begins.
#include <cctype>

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
  explicit EbnfParser(std::string_view text) : in_(text) {}

  Result<RuleSet> parse() {
    space();
    while (!in_.at_end()) {
      const std::string name = rule_name();
      if (name.empty()) return in_.error("expected the name of a rule");
      space();
      if (!in_.take_word("::=")) return in_.error("expected '::='");
      space();
      const int rule = rules_.find_or_add(name);
      if (rules_.defined(rule)) return in_.error("a second definition of rule '" + name + "'");
      FRESHET_ASSIGN_OR_RETURN(Expression body, alternatives(0));
      rules_.define(rule, std::move(body));
      space();
    }
    if (!rules_.defined(0)) return invalid_argument("rule 'root' is missing");
    return std::move(rules_);
  }

 private:
  void space() {
    for (;;) {
      while (!in_.at_end() && std::isspace(static_cast<unsigned char>(in_.peek()))) in_.skip();
      if (in_.peek() != '#') return;
      while (!in_.at_end() && in_.peek() != '\n') in_.skip();
    }
  }

  std::string rule_name() {
    const size_t begin = in_.position();
    while (is_name_char(in_.peek())) in_.skip();
    return std::string(in_.since(begin));
  }

  // Whether `name ::=` begins here: the next rule, and so the end of this one.
  bool at_next_rule() {
    const size_t begin = in_.position();
    const bool named = !rule_name().empty();
    space();
    const bool found = named && in_.take_word("::=");
    in_.seek(begin);
    return found;
  }

  Result<Expression> alternatives(int depth) {
    if (depth > kMaxDepth) return in_.error("groups are nested too deeply");
    std::vector<Expression> parts;
    do {
      space();
      FRESHET_ASSIGN_OR_RETURN(Expression e, terms(depth));
      parts.push_back(std::move(e));
      space();
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
      if (in_.take('*')) {
        e = repeat(std::move(e), 0, -1);
      } else if (in_.take('+')) {
        e = repeat(std::move(e), 1, -1);
      } else if (in_.take('?')) {
        e = repeat(std::move(e), 0, 1);
      } else if (in_.take('{')) {
        const auto low = in_.number();
        if (!low) return in_.error("expected a number");
        int high = *low;
        if (in_.take(',')) high = in_.number().value_or(-1);
        if (!in_.take('}')) return in_.error("expected '}'");
        if (*low > kMaxRepeat || high > kMaxRepeat || (high >= 0 && high < *low))
          return in_.error("impossible repetition bounds");
        e = repeat(std::move(e), *low, high);
      } else {
        return e;
      }
    }
  }

  Result<Expression> atom(int depth) {
    if (in_.take('"')) return string();
    if (in_.take('[')) return bracket();
    if (in_.take('.')) return char_class({}, true);
    if (in_.take('(')) {
      FRESHET_ASSIGN_OR_RETURN(Expression e, alternatives(depth + 1));
      if (!in_.take(')')) return in_.error("missing ')'");
      return e;
    }
    const std::string name = rule_name();
    if (name.empty()) return in_.error("expected a literal, a class, a group or a rule");
    return rule_ref(rules_.find_or_add(name));
  }

  Result<uint32_t> character() {
    const auto code = in_.take('\\') ? in_.escaped_code_point() : in_.code_point();
    if (!code) return in_.error("an invalid character or escape");
    return *code;
  }

  Result<Expression> string() {
    std::vector<Expression> parts;
    while (!in_.take('"')) {
      if (in_.at_end()) return in_.error("missing '\"'");
      FRESHET_ASSIGN_OR_RETURN(const uint32_t code, character());
      parts.push_back(char_class({{code, code}}));
    }
    return sequence(std::move(parts));
  }

  Result<Expression> bracket() {
    const bool negated = in_.take('^');
    std::vector<CodeRange> ranges;
    while (!in_.take(']')) {
      if (in_.at_end()) return in_.error("missing ']'");
      FRESHET_ASSIGN_OR_RETURN(const uint32_t low, character());
      uint32_t high = low;
      if (in_.peek() == '-' && in_.peek(1) != ']') {
        in_.skip();
        FRESHET_ASSIGN_OR_RETURN(high, character());
        if (high < low) return in_.error("a class range out of order");
      }
      ranges.push_back({low, high});
    }
    return char_class(std::move(ranges), negated);
  }

  TextCursor in_;
  RuleSet rules_;
};

}  // namespace

Result<RuleSet> parse_ebnf(std::string_view text) {
  auto rules = EbnfParser(text).parse();
  if (!rules.ok()) return rules.status().with_context("grammar");
  return rules;
}

}  // namespace freshet::grammar

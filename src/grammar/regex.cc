// Regular expressions, restricted to the regular part of ECMAScript's syntax: literals, ., classes,
// \d \w \s and their complements, escapes, groups (capturing or not, named), |, * + ? {m,n} (lazy
// forms mean the same language), ^ and $ at the ends. Look-around, back-references and word
// boundaries are refused by name.
#include <optional>

#include "grammar/expression.h"
#include "grammar/text_cursor.h"

namespace freshet::grammar {
namespace {

constexpr int kMaxGroups = 128;
constexpr int kMaxRepetitions = 10'000;

const std::vector<CodeRange> kDigit = {{'0', '9'}};
const std::vector<CodeRange> kWord = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const std::vector<CodeRange> kSpace = {
    {'\t', '\r'},     {' ', ' '},       {0xa0, 0xa0},     {0x1680, 0x1680}, {0x2000, 0x200a},
    {0x2028, 0x2029}, {0x202f, 0x202f}, {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};

class RegexParser {
 public:
  RegexParser(std::string_view pattern, bool search) : in_(pattern), search_(search) {}

  Result<Expression> parse() {
    FRESHET_ASSIGN_OR_RETURN(Expression e, alternatives(0));
    if (!in_.at_end()) return in_.error("unbalanced ')'");
    return e;
  }

 private:
  Result<Expression> alternatives(int depth) {
    if (depth > kMaxGroups) return in_.error("groups are nested too deeply");
    std::vector<Expression> parts;
    do {
      FRESHET_ASSIGN_OR_RETURN(Expression e, terms(depth));
      parts.push_back(std::move(e));
    } while (in_.take('|'));
    return choice(std::move(parts));
  }

  Result<Expression> terms(int depth) {
    std::vector<Expression> parts;
    while (!in_.at_end() && in_.peek() != '|' && in_.peek() != ')') {
      const bool at_start = parts.empty();
      if (search_ && (in_.peek() == '^' || in_.peek() == '$')) {
        parts.push_back(anchor());
        continue;
      }
      if (in_.take('^')) {
        if (!at_start) return in_.not_supported("'^' that is not at the beginning is");
        continue;
      }
      if (in_.take('$')) {
        if (!in_.at_end() && in_.peek() != '|' && in_.peek() != ')')
          return in_.not_supported("'$' that is not at the end is");
        continue;
      }
      FRESHET_ASSIGN_OR_RETURN(Expression e, atom(depth));
      FRESHET_ASSIGN_OR_RETURN(e, quantified(std::move(e)));
      parts.push_back(std::move(e));
    }
    return sequence(std::move(parts));
  }

  // One anchor or several equal ones, which mean the same as one.
  Expression anchor() {
    const char c = in_.peek();
    while (in_.take(c)) {
    }
    Expression e = char_class({});
    const uint32_t mark = c == '^' ? kTextBegin : kTextEnd;
    e.ranges.push_back({mark, mark});
    return e;
  }

  Result<Expression> quantified(Expression e) {
    for (;;) {
      int min = 0;
      int max = -1;
      if (in_.take('*')) {
      } else if (in_.take('+')) {
        min = 1;
      } else if (in_.take('?')) {
        max = 1;
      } else if (!bounds(min, max)) {
        return e;
      }
      if (min > kMaxRepetitions || max > kMaxRepetitions)
        return in_.error("a repetition of more than 10000");
      if (max >= 0 && max < min) return in_.error("a repetition whose bounds are out of order");
      in_.take('?');  // lazy: the same language
      e = repeat(std::move(e), min, max);
    }
  }

  // {m}, {m,} or {m,n}; any other brace is a literal.
  bool bounds(int& min, int& max) {
    const size_t begin = in_.position();
    if (!in_.take('{')) return false;
    const auto low = in_.number();
    if (low) {
      min = max = *low;
      if (in_.take(',')) {
        const auto high = in_.number();
        max = high ? *high : -1;
      }
      if (in_.take('}')) return true;
    }
    in_.seek(begin);
    return false;
  }

  Result<Expression> atom(int depth) {
    if (in_.take('(')) return group(depth);
    if (in_.take('[')) return bracket();
    if (in_.take('.')) return char_class({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}, true);
    if (in_.take('\\')) return escape();
    const char c = in_.peek();
    if (c == '*' || c == '+' || c == '?') return in_.error("nothing to repeat");
    const auto code = in_.code_point();
    if (!code) return in_.error("invalid UTF-8");
    return char_class({{*code, *code}});
  }

  Result<Expression> group(int depth) {
    if (in_.take('?')) {
      if (in_.take(':')) {
      } else if (in_.take('<') || in_.take_word("P<")) {
        if (in_.peek() == '=' || in_.peek() == '!') return in_.not_supported("look-behind is");
        while (!in_.at_end() && in_.peek() != '>') in_.skip();
        in_.take('>');
      } else {
        return in_.not_supported("look-ahead and inline flags are");
      }
    }
    FRESHET_ASSIGN_OR_RETURN(Expression e, alternatives(depth + 1));
    if (!in_.take(')')) return in_.error("missing ')'");
    return e;
  }

  // \d, \w, \s and their complements, as ranges.
  std::optional<std::vector<CodeRange>> shorthand(char c) {
    switch (c) {
      case 'd':
        return kDigit;
      case 'w':
        return kWord;
      case 's':
        return normalize_class(kSpace, false);
      case 'D':
        return normalize_class(kDigit, true);
      case 'W':
        return normalize_class(kWord, true);
      case 'S':
        return normalize_class(kSpace, true);
      default:
        return std::nullopt;
    }
  }

  Result<Expression> escape() {
    if (in_.at_end()) return in_.error("a trailing '\\'");
    if (auto ranges = shorthand(in_.peek())) {
      in_.skip();
      return char_class(std::move(*ranges));
    }
    const char c = in_.peek();
    if (c == 'b' || c == 'B') return in_.not_supported("word boundaries are");
    if (c >= '1' && c <= '9') return in_.not_supported("back-references are");
    if (c == 'k') return in_.not_supported("back-references are");
    if (c == 'p' || c == 'P') return in_.not_supported("Unicode properties are");
    FRESHET_ASSIGN_OR_RETURN(const uint32_t code, escaped_code());
    return char_class({{code, code}});
  }

  Result<uint32_t> escaped_code() {
    const auto code = in_.escaped_code_point();
    if (!code) return in_.error("an unknown escape");
    return *code;
  }

  Result<Expression> bracket() {
    const bool negated = in_.take('^');
    std::vector<CodeRange> ranges;
    for (bool first = true; first || in_.at_end() || in_.peek() != ']'; first = false) {
      if (in_.at_end()) return in_.error("missing ']'");
      if (first && in_.peek() == ']') break;
      bool set = false;
      FRESHET_ASSIGN_OR_RETURN(const uint32_t low, class_atom(ranges, set));
      if (set) continue;
      uint32_t high = low;
      const size_t begin = in_.position();
      if (in_.take('-')) {
        if (in_.at_end() || in_.peek() == ']') {
          in_.seek(begin);  // a literal '-' at the end
        } else {
          FRESHET_ASSIGN_OR_RETURN(high, class_atom(ranges, set));
          if (set || high < low) return in_.error("a class range out of order");
        }
      }
      ranges.push_back({low, high});
    }
    in_.skip();
    Expression e = char_class(std::move(ranges), negated);
    return e;
  }

  // One member of a class: a code point, or (set) a shorthand that was added to `ranges`.
  Result<uint32_t> class_atom(std::vector<CodeRange>& ranges, bool& set) {
    if (!in_.take('\\')) {
      const auto code = in_.code_point();
      if (!code) return in_.error("invalid UTF-8");
      return *code;
    }
    if (in_.at_end()) return in_.error("missing ']'");
    if (auto more = shorthand(in_.peek())) {
      in_.skip();
      ranges.insert(ranges.end(), more->begin(), more->end());
      set = true;
      return 0U;
    }
    if (in_.take('b')) return 8U;
    return escaped_code();
  }

  TextCursor in_;
  bool search_;  // anchors count as characters
};

}  // namespace

Result<Expression> parse_regex(std::string_view pattern) {
  auto e = RegexParser(pattern, false).parse();
  if (!e.ok()) return e.status().with_context("regular expression");
  return e;
}

Result<Expression> parse_search_regex(std::string_view pattern) {
  auto e = RegexParser(pattern, true).parse();
  if (!e.ok()) return e.status().with_context("regular expression");
  return e;
}

}  // namespace freshet::grammar

#include "grammar/expression.h"

#include <algorithm>

#include "base/utf8.h"

namespace freshet::grammar {

std::vector<CodeRange> normalize_class(std::vector<CodeRange> ranges, bool negated) {
  std::sort(ranges.begin(), ranges.end(),
            [](const CodeRange& a, const CodeRange& b) { return a.first < b.first; });
  std::vector<CodeRange> merged;
  for (const CodeRange& r : ranges) {
    if (!merged.empty() && r.first <= merged.back().last + 1) {
      merged.back().last = std::max(merged.back().last, r.last);
    } else {
      merged.push_back(r);
    }
  }
  if (negated) {
    std::vector<CodeRange> rest;
    uint32_t next = 0;
    for (const CodeRange& r : merged) {
      if (r.first > next) rest.push_back({next, r.first - 1});
      next = r.last + 1;
    }
    if (next <= kMaxCodePoint) rest.push_back({next, kMaxCodePoint});
    merged = std::move(rest);
  }
  std::vector<CodeRange> out;  // without surrogates, which UTF-8 cannot hold
  for (const CodeRange& r : merged) {
    if (r.first < 0xd800) out.push_back({r.first, std::min(r.last, 0xd7ffU)});
    if (r.last > 0xdfff)
      out.push_back({std::max(r.first, 0xe000U), std::min(r.last, kMaxCodePoint)});
  }
  return out;
}

Expression literal(std::string_view bytes) {
  Expression e;
  e.kind = Expression::Kind::kLiteral;
  e.literal = bytes;
  return e;
}

Expression char_class(std::vector<CodeRange> ranges, bool negated) {
  Expression e;
  e.kind = Expression::Kind::kClass;
  e.ranges = normalize_class(std::move(ranges), negated);
  return e;
}

Expression sequence(std::vector<Expression> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  Expression e;
  e.kind = Expression::Kind::kSequence;
  e.children = std::move(parts);
  return e;
}

Expression choice(std::vector<Expression> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  Expression e;
  e.kind = Expression::Kind::kChoice;
  e.children = std::move(parts);
  return e;
}

Expression repeat(Expression body, int min, int max) {
  Expression e;
  e.kind = Expression::Kind::kRepeat;
  e.min = min;
  e.max = max;
  e.children.push_back(std::move(body));
  return e;
}

Expression optional(Expression e) {
  return repeat(std::move(e), 0, 1);
}

Expression rule_ref(int rule) {
  Expression e;
  e.kind = Expression::Kind::kRule;
  e.rule = rule;
  return e;
}

std::optional<std::string> only_text(const Expression& e) {
  std::string out;
  switch (e.kind) {
    case Expression::Kind::kLiteral:
      return e.literal;
    case Expression::Kind::kClass:
      if (e.ranges.size() != 1 || e.ranges[0].first != e.ranges[0].last ||
          e.ranges[0].last > kMaxCodePoint)
        return std::nullopt;
      append_utf8(out, e.ranges[0].first);
      return out;
    case Expression::Kind::kSequence:
      for (const Expression& child : e.children) {
        const auto part = only_text(child);
        if (!part) return std::nullopt;
        out += *part;
      }
      return out;
    default:
      return std::nullopt;
  }
}

RuleSet::RuleSet() {
  add("root");
}

int RuleSet::add(std::string name) {
  const int id = size();
  by_name_.emplace(name, id);
  rules_.push_back({std::move(name), {}, false});
  return id;
}

int RuleSet::add(std::string name, Expression body) {
  const int id = add(std::move(name));
  define(id, std::move(body));
  return id;
}

int RuleSet::find_or_add(const std::string& name) {
  const auto it = by_name_.find(name);
  return it != by_name_.end() ? it->second : add(name);
}

void RuleSet::define(int rule, Expression body) {
  rules_[static_cast<size_t>(rule)].body = std::move(body);
  rules_[static_cast<size_t>(rule)].defined = true;
}

Expression quoted_json(std::string_view text) {
  std::string out = "\"";
  constexpr char kHex[] = "0123456789abcdef";
  constexpr std::string_view kShort = "\b\f\n\r\t";
  constexpr std::string_view kLetters = "bfnrt";
  for (const char c : text) {
    const unsigned char u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (const size_t at = kShort.find(c); at != std::string_view::npos) {
      out += '\\';
      out += kLetters[at];
    } else if (u < 0x20) {
      out += "\\u00";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    } else {
      out += c;
    }
  }
  return literal(out + "\"");
}

}  // namespace freshet::grammar

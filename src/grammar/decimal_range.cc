#include "grammar/decimal_range.h"

#include <algorithm>
#include <cctype>

namespace freshet::grammar {
namespace {

constexpr int64_t kMaxDigits = 400;  // limits the effect of an exponent too
constexpr uint64_t kMaxModulus = 10'000;

Expression digit(char first, char last) {
  return char_class({{static_cast<uint32_t>(first), static_cast<uint32_t>(last)}});
}
Expression digits(size_t min, int max) {
  return repeat(digit('0', '9'), static_cast<int>(min), max);
}
Expression exactly_digits(size_t n) {
  return digits(n, static_cast<int>(n));
}

// Integer parts greater than `w`.
Expression whole_above(const std::string& w) {
  std::vector<Expression> parts = {sequence({digit('1', '9'), digits(w.size(), -1)})};
  for (size_t i = 0; i < w.size(); ++i) {
    if (w[i] == '9') continue;
    parts.push_back(sequence({literal(w.substr(0, i)), digit(static_cast<char>(w[i] + 1), '9'),
                              exactly_digits(w.size() - i - 1)}));
  }
  return choice(std::move(parts));
}

Expression whole_below(const std::string& w) {
  std::vector<Expression> parts;
  if (w.size() > 1) {
    parts.push_back(literal("0"));
    parts.push_back(sequence({digit('1', '9'), digits(0, static_cast<int>(w.size()) - 2)}));
  }
  for (size_t i = 0; i < w.size(); ++i) {
    const char first = i == 0 && w.size() > 1 ? '1' : '0';
    if (w[i] <= first) continue;
    parts.push_back(sequence({literal(w.substr(0, i)), digit(first, static_cast<char>(w[i] - 1)),
                              exactly_digits(w.size() - i - 1)}));
  }
  return choice(std::move(parts));
}

Expression any_fraction() {
  return optional(sequence({literal("."), digits(1, -1)}));
}

// Fractions (with their point, or none) above or below .f; `f` has no trailing zeros.
Expression fraction_above(const std::string& f, bool strict) {
  std::vector<Expression> parts;
  const Expression nonzero =
      sequence({repeat(literal("0"), 0, -1), digit('1', '9'), digits(0, -1)});
  if (f.empty()) {
    if (!strict) return any_fraction();
    return sequence({literal("."), nonzero});
  }
  for (size_t i = 0; i < f.size(); ++i) {
    if (f[i] == '9') continue;
    parts.push_back(sequence(
        {literal("." + f.substr(0, i)), digit(static_cast<char>(f[i] + 1), '9'), digits(0, -1)}));
  }
  parts.push_back(sequence({literal("." + f), strict ? nonzero : digits(0, -1)}));
  return choice(std::move(parts));
}

Expression fraction_below(const std::string& f, bool strict) {
  std::vector<Expression> parts;
  if (!f.empty()) parts.push_back(empty());
  for (size_t i = 0; i < f.size(); ++i) {
    if (i > 0) parts.push_back(literal("." + f.substr(0, i)));
    if (f[i] == '0') continue;
    parts.push_back(sequence(
        {literal("." + f.substr(0, i)), digit('0', static_cast<char>(f[i] - 1)), digits(0, -1)}));
  }
  const Expression zeros = repeat(literal("0"), 0, -1);
  if (!strict && f.empty()) {
    parts.push_back(optional(sequence({literal("."), repeat(literal("0"), 1, -1)})));
  } else if (!strict) {
    parts.push_back(sequence({literal("." + f), zeros}));
  }
  return choice(std::move(parts));
}

Expression magnitude(const Decimal& d, bool above, bool strict) {
  return choice({sequence({above ? whole_above(d.whole) : whole_below(d.whole), any_fraction()}),
                 sequence({literal(d.whole), above ? fraction_above(d.fraction, strict)
                                                   : fraction_below(d.fraction, strict)})});
}

Expression any_magnitude() {
  return sequence(
      {choice({literal("0"), sequence({digit('1', '9'), digits(0, -1)})}), any_fraction()});
}

}  // namespace

std::optional<Decimal> parse_decimal(std::string_view text) {
  Decimal d;
  if (text.starts_with('-')) {
    d.negative = true;
    text.remove_prefix(1);
  }
  const size_t e = text.find_first_of("eE");
  int64_t exponent = 0;
  if (e != std::string_view::npos) {
    std::string_view digits = text.substr(e + 1);
    const bool down = digits.starts_with('-');
    if (down || digits.starts_with('+')) digits.remove_prefix(1);
    for (const char c : digits) exponent = std::min<int64_t>(exponent * 10 + (c - '0'), 100'000);
    if (down) exponent = -exponent;
    text = text.substr(0, e);
  }
  const size_t point = std::min(text.find('.'), text.size());
  std::string all(text.substr(0, point));
  int64_t scale = static_cast<int64_t>(all.size()) + exponent;
  if (point < text.size()) all += text.substr(point + 1);
  if (all.find_first_not_of('0') == std::string::npos) {
    d.negative = false;
    return d;
  }
  if (scale > kMaxDigits || scale < -kMaxDigits || all.size() > kMaxDigits) return std::nullopt;
  if (scale < 0) {
    all.insert(0, static_cast<size_t>(-scale), '0');
    scale = 0;
  }
  const size_t whole = static_cast<size_t>(scale);
  if (all.size() < whole) all.append(whole - all.size(), '0');
  d.whole = all.substr(0, whole);
  d.fraction = all.substr(whole);
  d.whole.erase(0, std::min(d.whole.find_first_not_of('0'), d.whole.size()));
  if (d.whole.empty()) d.whole = "0";
  while (d.fraction.ends_with('0')) d.fraction.pop_back();
  return d;
}

Result<Language> decimals_above(const Decimal& d, bool strict) {
  if (d.negative) {
    return Language::from(
        choice({any_magnitude(), sequence({literal("-"), magnitude(d, false, strict)})}));
  }
  std::vector<Expression> parts = {magnitude(d, true, strict)};
  if (d.is_zero() && !strict) parts.push_back(sequence({literal("-"), magnitude(d, false, false)}));
  return Language::from(choice(std::move(parts)));
}

Result<Language> decimals_below(const Decimal& d, bool strict) {
  if (d.negative) return Language::from(sequence({literal("-"), magnitude(d, true, strict)}));
  if (d.is_zero() && strict)
    return Language::from(sequence({literal("-"), magnitude(d, true, true)}));
  return Language::from(
      choice({sequence({literal("-"), any_magnitude()}), magnitude(d, false, strict)}));
}

Result<Language> whole_decimals(bool fraction) {
  return Language::from(sequence(
      {optional(literal("-")), choice({literal("0"), sequence({digit('1', '9'), digits(0, -1)})}),
       fraction ? optional(sequence({literal("."), repeat(literal("0"), 1, -1)})) : empty()}));
}

Result<Language> all_decimals() {
  return Language::from(sequence({optional(literal("-")), any_magnitude()}));
}

// A state records the number of digits after the point and the value of all digits modulo the
// divisor.
Result<Language> multiples_of(const Decimal& d) {
  const size_t places = d.fraction.size();
  uint64_t modulus = 0;
  for (const char c : d.whole + d.fraction) {
    modulus = modulus * 10 + static_cast<uint64_t>(c - '0');
    if (modulus > kMaxModulus) return unsupported("the divisor has too many digits");
  }
  if (d.negative || modulus == 0) return invalid_argument("the divisor must be more than 0");
  if ((places + 3) * modulus > Language::kMaxStates)
    return unsupported("the divisor has too many digits");
  // Layers: 0 is the integer part, 1 the point itself, 1+k is after k decimal places, the last
  // accepts only zeros.
  const size_t layers = places + 3;
  std::vector<Language::State> states(layers * modulus);
  const auto id = [&](size_t layer, uint64_t rest) {
    return static_cast<int32_t>(layer * modulus + rest);
  };
  for (size_t layer = 0; layer < layers; ++layer) {
    for (uint64_t rest = 0; rest < modulus; ++rest) {
      Language::State& s = states[static_cast<size_t>(id(layer, rest))];
      if (layer == 0) s.edges.push_back({'.', '.', id(1, rest)});
      uint64_t missing = rest;  // missing decimal places are zeros
      const size_t written = layer < 2 ? 0 : std::min(layer - 1, places);
      for (size_t k = written; k < places; ++k) missing = missing * 10 % modulus;
      s.accepts = layer != 1 && missing == 0;
      const bool zeros_only = layer >= places + 1;
      for (uint32_t c = 0; c <= (zeros_only ? 0U : 9U); ++c) {
        const uint64_t next = zeros_only ? rest : (rest * 10 + c) % modulus;
        const size_t to = layer == 0 ? 0 : std::min(layer + 1, layers - 1);
        s.edges.push_back({'0' + c, '0' + c, id(to, next)});
      }
    }
  }
  FRESHET_ASSIGN_OR_RETURN(const Language all, all_decimals());
  // The sign comes first: both variants start in the same state.
  Language::State signed_start = states[0];
  signed_start.accepts = false;
  for (auto& s : states) {
    for (auto& e : s.edges) ++e.target;
  }
  for (auto& e : signed_start.edges) ++e.target;
  signed_start.edges.insert(signed_start.edges.begin(), {'-', '-', 1});
  states.insert(states.begin(), std::move(signed_start));
  return intersect(Language::from_states(std::move(states)), all);
}

}  // namespace freshet::grammar

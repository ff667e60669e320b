#include "tokenizer/template/number.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/json.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

// Removes surrounding whitespace and underscores between digits; empty if underscores are
// misplaced.
std::string bare_number(std::string_view s) {
  s = strip(s, true, true, nullptr);
  std::string out;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] != '_') {
      out += s[i];
      continue;
    }
    const auto alnum = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
    if (i == 0 || i + 1 == s.size() || !alnum(s[i - 1]) || !alnum(s[i + 1])) return {};
  }
  return out;
}

std::optional<BigInt> parse_int(std::string_view text, int64_t base) {
  if (base != 0 && (base < 2 || base > 36)) fail("int() base must be >= 2 and <= 36, or 0");
  std::string s = bare_number(text);
  const bool negative = !s.empty() && s[0] == '-';
  if (!s.empty() && (s[0] == '-' || s[0] == '+')) s.erase(0, 1);
  if (s.size() > 1 && s[0] == '0') {
    const char p = static_cast<char>(s[1] | 0x20);
    const int64_t prefix = p == 'x' ? 16 : p == 'o' ? 8 : p == 'b' ? 2 : 0;
    if (prefix != 0 && (base == 0 || base == prefix)) {
      base = prefix;
      s.erase(0, 2);
    }
  }
  if (s.empty() || s[0] == '-' || s[0] == '+') return std::nullopt;
  if (negative) s.insert(0, 1, '-');
  return BigInt::parse(s, base == 0 ? 10 : static_cast<int>(base));
}

std::optional<double> parse_float(std::string_view text) {
  std::string s = lower(bare_number(text));
  const bool negative = !s.empty() && s[0] == '-';
  if (!s.empty() && (s[0] == '-' || s[0] == '+')) s.erase(0, 1);
  double value = 0;
  if (s == "inf" || s == "infinity") {
    value = INFINITY;
  } else if (s == "nan") {
    value = NAN;
  } else {
    if (s.find_first_not_of("0123456789.e+-") != kNotFound || s.empty() || s[0] == '-') {
      return std::nullopt;
    }
    const char* end = s.data() + s.size();
    const auto result = std::from_chars(s.data(), end, value);
    if (result.ptr != end || result.ec == std::errc::invalid_argument) return std::nullopt;
    if (result.ec != std::errc()) value = json::Value::number_from_text(s).as_double();
  }
  return negative ? -value : value;
}

}  // namespace

BigInt to_big(const Value& v) {
  return v.is_int() ? BigInt(v.as_int()) : BigInt::parse(v.text()).value();
}

Value from_big(Runtime& rt, const BigInt& v) {
  if (const auto small = v.to_int64()) return Value(*small);
  return rt.big_int(v.text());
}

double nearest_float(const Value& v) {
  return v.is(Kind::kBigInt) ? to_big(v).to_double() : v.as_float();
}

std::optional<double> to_float(const Value& v) {
  if (v.is(Kind::kBigInt)) {
    const double d = nearest_float(v);
    if (std::isinf(d)) fail("int too large to convert to float");
    return d;
  }
  if (v.is_number()) return v.as_float();
  if (v.is_string()) return parse_float(v.text());
  return std::nullopt;
}

std::optional<Value> to_int(Runtime& rt, const Value& v, int64_t base) {
  if (v.is(Kind::kBigInt)) return v;
  if (v.is_int()) return Value(v.as_int());
  if (v.is_string()) {
    if (const auto i = parse_int(v.text(), base)) return from_big(rt, *i);
  }
  const auto d = to_float(v);
  if (!d || std::isnan(*d) || std::isinf(*d)) return std::nullopt;
  return from_big(rt, BigInt::from_double(*d));
}

Value round_number(Runtime& rt, const Value& v, int digits) {
  if (v.is_integer()) {
    if (digits >= 0) return v.is(Kind::kBigInt) ? v : Value(v.as_int());
    const BigInt unit = BigInt(10).pow(static_cast<uint64_t>(-digits));
    auto [down, rest] = to_big(v).floor_div(unit);
    const auto half = rest + rest <=> unit;
    const bool odd = !down.floor_div(BigInt(2)).second.is_zero();
    if (half > 0 || (half == 0 && odd)) down = down + BigInt(1);
    return from_big(rt, down * unit);
  }
  const double d = v.as_float();
  if (std::isnan(d) || std::isinf(d) || digits > 308) return v;
  if (digits >= 0) {
    const std::string text = fixed(d, digits);
    double out = 0;
    std::from_chars(text.data(), text.data() + text.size(), out);
    return Value(out);
  }
  // Left of the point the scaled value is exact enough; it is rounded half to even itself.
  const double unit = std::pow(10.0, -digits);
  return Value(std::isinf(unit) ? std::copysign(0.0, d) : std::nearbyint(d / unit) * unit);
}

}  // namespace freshet::jinja

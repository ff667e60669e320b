#include "tokenizer/template/number.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/json.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

// Without whitespace around it and underscores between digits; empty if those are misplaced.
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

std::optional<int64_t> parse_int(std::string_view text, int64_t base) {
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
  if (s.empty() || s[0] == '-') return std::nullopt;
  if (negative) s.insert(0, 1, '-');
  int64_t value = 0;
  const char* end = s.data() + s.size();
  const auto result =
      std::from_chars(s.data(), end, value, base == 0 ? 10 : static_cast<int>(base));
  if (result.ptr != end || result.ec == std::errc::invalid_argument) return std::nullopt;
  if (result.ec != std::errc()) fail("an integer is beyond 64 bits");
  return value;
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

std::optional<double> to_float(const Value& v) {
  if (v.is_number()) return v.as_float();
  if (v.is_string()) return parse_float(v.text());
  return std::nullopt;
}

std::optional<int64_t> to_int(const Value& v, int64_t base) {
  if (v.is_int()) return v.as_int();
  if (v.is_string()) {
    if (const auto i = parse_int(v.text(), base)) return i;
  }
  const auto d = to_float(v);
  if (!d || std::isnan(*d) || std::isinf(*d)) return std::nullopt;
  if (!(std::fabs(*d) < 0x1p63)) fail("an integer is beyond 64 bits");
  return static_cast<int64_t>(*d);
}

Value round_number(const Value& v, int digits) {
  if (v.is_int()) {
    if (digits >= 0) return Value(v.as_int());
    if (digits < -18) return Value(int64_t{0});
    __extension__ using Wide = __int128;  // for the ends of the range
    Wide unit = 1;
    for (int i = 0; i < -digits; ++i) unit *= 10;
    const Wide n = v.as_int();
    Wide down = n / unit - (n % unit < 0 ? 1 : 0);
    const Wide rest = n - down * unit;
    if (rest * 2 > unit || (rest * 2 == unit && down % 2 != 0)) ++down;
    if (down * unit > INT64_MAX || down * unit < INT64_MIN) fail("an integer is beyond 64 bits");
    return Value(static_cast<int64_t>(down * unit));
  }
  const double d = v.as_float();
  if (std::isnan(d) || std::isinf(d) || digits > 308) return v;
  if (digits >= 0) {
    const std::string text = fixed(d, digits);
    double out = 0;
    std::from_chars(text.data(), text.data() + text.size(), out);
    return Value(out);
  }
  // Left of the point the scaled value is exact enough, being itself rounded to even.
  const double unit = std::pow(10.0, -digits);
  return Value(std::isinf(unit) ? std::copysign(0.0, d) : std::nearbyint(d / unit) * unit);
}

}  // namespace freshet::jinja

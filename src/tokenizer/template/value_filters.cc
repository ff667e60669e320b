// Filters on numbers and on values of any kind.
#include <cmath>

#include "base/escape_html.h"
#include "base/json.h"
#include "tokenizer/template/builtins.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/number.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

Value do_default(Runtime& rt, const Value& v, const Bound& a) {
  if (!v.is_undefined() && !(a.flag(1) && !truth(v))) return v;
  return a.has(0) ? *a[0] : rt.str("");
}

Value do_abs(Runtime& rt, const Value& v, const Bound&) {
  need_defined(v);
  if (v.is(Kind::kBigInt)) return v.text().starts_with('-') ? negate(rt, v) : v;
  if (v.is_int()) return v.as_int() < 0 ? negate(rt, v) : Value(v.as_int());
  if (v.is(Kind::kFloat)) return Value(std::fabs(v.as_float()));
  fail("bad operand type for abs(): '{}'", type_name(v));
}

Value do_int(Runtime& rt, const Value& v, const Bound& a) {
  need_defined(v);
  const Value fallback = a.has(0) ? *a[0] : Value(int64_t{0});
  rt.charge(v.is_string() ? v.text().size() : 0);
  const auto result = to_int(rt, v, a.integer(1, 10, "int's base"));
  return result ? *result : fallback;
}

Value do_float(Runtime& rt, const Value& v, const Bound& a) {
  need_defined(v);
  rt.charge(v.is_string() ? v.text().size() : 0);
  const auto result = to_float(v);
  return result ? Value(*result) : a.has(0) ? *a[0] : Value(0.0);
}

Value do_round(Runtime& rt, const Value& v, const Bound& a) {
  need_defined(v);
  if (!is_any_number(v)) fail("type {} doesn't define __round__ method", type_name(v));
  const int64_t precision = a.integer(0, 0, "round's precision");
  if (precision < -400 || precision > 400) fail("round's precision is limited to 400");
  const std::string method = a.has(1) ? need_string(*a[1], "round's method") : "common";
  if (method == "common") return round_number(rt, v, static_cast<int>(precision));
  if (method != "ceil" && method != "floor") fail("method must be common, ceil or floor");
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double scaled = *to_float(v) * scale;
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

Value do_string(Runtime& rt, const Value& v, const Bound&) {
  return soft_str(rt, v);
}

Value do_safe(Runtime& rt, const Value& v, const Bound&) {
  return v.is_markup() ? v : rt.str(str_of(rt, v), true);
}

Value do_escape(Runtime& rt, const Value& v, const Bound&) {
  if (v.is_markup()) return v;
  const std::string text = str_of(rt, v);
  rt.expect(text.size(), 5);
  return rt.str(escape_html(text), true);
}

Value do_force_escape(Runtime& rt, const Value& v, const Bound&) {
  const std::string text = str_of(rt, v);
  rt.expect(text.size(), 5);
  return rt.str(escape_html(text), true);
}

Value do_length(Runtime& rt, const Value& v, const Bound&) {
  return Value(length(rt, v));
}

Value do_attr(Runtime& rt, const Value& v, const Bound& a) {
  // Attributes only, no items: the only attributes of a dict are its methods.
  const std::string& name = need_string(*a[0], "attr's name");
  if (v.is_dict()) return rt.undefined(fmt::format("'dict object' has no attribute '{}'", name));
  return get_attribute(rt, v, name);
}

Value do_tojson(Runtime& rt, const Value& v, const Bound& a) {
  JsonStyle style;
  style.ascii = a.flag(0);
  if (const Value* indent = a.given(1)) {
    style.pretty = true;
    if (indent->is_string()) {
      style.indent = indent->text();
    } else {
      const int64_t n = std::max<int64_t>(need_int(*indent, "tojson's indent"), 0);
      rt.expect(static_cast<size_t>(n));
      style.indent.assign(static_cast<size_t>(n), ' ');
    }
    style.item_separator.assign(1, ',');
  }
  if (const Value* separators = a.given(2)) {
    const Items items(rt, *separators);
    if (items.size() != 2) fail("tojson's separators must be two strings");
    style.item_separator = need_string(items[0], "a separator");
    style.key_separator = need_string(items[1], "a separator");
  }
  style.sort_keys = a.flag(3);
  return to_json(rt, v, style);
}

Value do_filesizeformat(Runtime& rt, const Value& v, const Bound& a) {
  need_defined(v);
  const auto number = to_float(v);
  if (!number) fail("could not convert to float");
  const bool binary = a.flag(0);
  const double base = binary ? 1024 : 1000;
  if (*number == 1) return rt.str("1 Byte");
  if (*number < base) return rt.str(fmt::format("{:.0f} Bytes", std::trunc(*number) + 0.0));
  static constexpr std::string_view kPrefixes = "kMGTPEZY";
  double unit = base;
  size_t i = 0;
  for (; i + 1 < kPrefixes.size() && *number >= unit * base; ++i) unit *= base;
  const std::string prefix = binary && i == 0 ? "K" : std::string(1, kPrefixes[i]);
  return rt.str(fixed(*number / unit, 1) + " " + prefix + (binary ? "iB" : "B"));
}

constexpr Builtin kFilters[] = {
    {"default", "default_value boolean", 0, do_default},
    {"d", "default_value boolean", 0, do_default},
    {"abs", "", 0, do_abs},
    {"int", "default base", 0, do_int},
    {"float", "default", 0, do_float},
    {"round", "precision method", 0, do_round},
    {"string", "", 0, do_string},
    {"safe", "", 0, do_safe},
    {"escape", "", 0, do_escape},
    {"e", "", 0, do_escape},
    {"forceescape", "", 0, do_force_escape},
    {"length", "", 0, do_length},
    {"count", "", 0, do_length},
    {"attr", "name", 1, do_attr},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, do_tojson},
    {"filesizeformat", "binary", 0, do_filesizeformat},
};

}  // namespace

std::span<const Builtin> value_filters() {
  return kFilters;
}

}  // namespace freshet::jinja

#include <algorithm>
#include <cmath>

#include "base/escape_html.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/number.h"
#include "tokenizer/template/operators.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

// Integers that do not fit 64 bits, or whose result may not.
Value big_binary(Runtime& rt, BinaryOp op, const Value& x, const Value& y) {
  const auto digits = [](const Value& v) -> size_t {
    return v.is(Kind::kBigInt) ? v.text().size() : 20;
  };
  const size_t work = digits(x) + digits(y);
  rt.step(1 + static_cast<int64_t>(work * work / 1000));
  const BigInt a = to_big(x), b = to_big(y);
  const bool divides = op == BinaryOp::kDiv || op == BinaryOp::kFloorDiv || op == BinaryOp::kMod;
  if (divides && b.is_zero()) {
    fail("{}", op == BinaryOp::kDiv ? "division by zero" : "integer division or modulo by zero");
  }
  switch (op) {
    case BinaryOp::kAdd:
      return from_big(rt, a + b);
    case BinaryOp::kSub:
      return from_big(rt, a - b);
    case BinaryOp::kMul:
      return from_big(rt, a * b);
    case BinaryOp::kFloorDiv:
      return from_big(rt, a.floor_div(b).first);
    case BinaryOp::kMod:
      return from_big(rt, a.floor_div(b).second);
    case BinaryOp::kDiv: {
      const double quotient = a.divided_by(b);
      if (!std::isfinite(quotient)) fail("integer division result too large for a float");
      return Value(quotient);
    }
    case BinaryOp::kPow:
      break;
  }
  if (b.negative()) {
    if (a.is_zero()) fail("0.0 cannot be raised to a negative power");
    return Value(std::pow(a.to_double(), b.to_double()));
  }
  rt.step(static_cast<int64_t>(BigInt::kMaxDigits));
  return from_big(rt, a.pow(static_cast<uint64_t>(b.to_int64().value_or(INT64_MAX))));
}

int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

int64_t floor_mod(int64_t a, int64_t b) {
  const int64_t m = a % b;
  return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}

// The result if it fits 64 bits.
std::optional<Value> int_binary(BinaryOp op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case BinaryOp::kAdd:
      if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
      return Value(result);
    case BinaryOp::kSub:
      if (__builtin_sub_overflow(a, b, &result)) return std::nullopt;
      return Value(result);
    case BinaryOp::kMul:
      if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
      return Value(result);
    case BinaryOp::kDiv:
      if (b == 0) return std::nullopt;
      return Value(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::kFloorDiv:
      if (b == 0 || b == -1) return std::nullopt;
      return Value(floor_div(a, b));
    case BinaryOp::kMod:
      if (b == 0 || b == -1) return std::nullopt;
      return Value(floor_mod(a, b));
    case BinaryOp::kPow:
      break;
  }
  return std::nullopt;
}

Value float_binary(BinaryOp op, double a, double b) {
  const bool divides = op == BinaryOp::kDiv || op == BinaryOp::kFloorDiv || op == BinaryOp::kMod;
  if (divides && b == 0) fail("float division by zero");
  switch (op) {
    case BinaryOp::kAdd:
      return Value(a + b);
    case BinaryOp::kSub:
      return Value(a - b);
    case BinaryOp::kMul:
      return Value(a * b);
    case BinaryOp::kDiv:
      return Value(a / b);
    case BinaryOp::kPow:
      return Value(std::pow(a, b));
    case BinaryOp::kFloorDiv:
    case BinaryOp::kMod:
      break;
  }
  double mod = std::fmod(a, b);
  double div = (a - mod) / b;
  if (mod != 0 && (mod < 0) != (b < 0)) {
    mod += b;
    div -= 1;
  }
  if (op == BinaryOp::kMod) return Value(mod == 0 ? std::copysign(0.0, b) : mod);
  // div is nearly an integer; like Python, round it to that integer and give a zero the sign of the
  // quotient.
  if (div == 0) return Value(std::copysign(0.0, a / b));
  const double floor = std::floor(div);
  return Value(div - floor > 0.5 ? floor + 1 : floor);
}

Value repeat(Runtime& rt, const Value& sequence, int64_t count) {
  const auto n = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (sequence.is_string()) {
    const std::string& s = sequence.text();
    rt.expect(s.size(), n);
    if (s.size() == 1) return rt.str(std::string(n, s[0]), sequence.is_markup());
    std::string out;
    out.reserve(s.size() * n);
    for (size_t i = 0; i < n && !s.empty(); ++i) out += s;
    return rt.str(std::move(out), sequence.is_markup());
  }
  const auto& items = sequence.items();
  rt.expect(items.size() * sizeof(Value), n);
  std::vector<Value> out;
  out.reserve(items.size() * n);
  for (size_t i = 0; i < n && !items.empty(); ++i) {
    rt.step(static_cast<int64_t>(items.size()));
    out.insert(out.end(), items.begin(), items.end());
  }
  return rt.list(std::move(out), sequence.kind());
}

Value add_strings(Runtime& rt, const Value& a, const Value& b) {
  const bool markup = a.is_markup() || b.is_markup();
  const auto part = [&](const Value& v) {
    return markup && !v.is_markup() ? escape_html(v.text()) : v.text();
  };
  rt.expect(a.text().size() + b.text().size());
  return rt.str(part(a) + part(b), markup);
}

std::string_view symbol(BinaryOp op) {
  static constexpr std::string_view kSymbols[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};
  return kSymbols[static_cast<size_t>(op)];
}

}  // namespace

Value binary(Runtime& rt, BinaryOp op, const Value& a, const Value& b) {
  need_defined(a);
  if (a.is_string() && op == BinaryOp::kMod) return format_percent(rt, a, b);
  need_defined(b);
  if (a.is_int() && b.is_int()) {
    if (auto result = int_binary(op, a.as_int(), b.as_int())) return *std::move(result);
  }
  if (a.is_integer() && b.is_integer()) return big_binary(rt, op, a, b);
  const auto is_number = [](const Value& v) { return v.is_number() || v.is(Kind::kBigInt); };
  if (is_number(a) && is_number(b)) return float_binary(op, *to_float(a), *to_float(b));
  if (op == BinaryOp::kAdd) {
    if (a.is_string() && b.is_string()) return add_strings(rt, a, b);
    if (a.is_list() && a.kind() == b.kind()) {
      rt.expect(a.items().size() + b.items().size(), sizeof(Value));
      std::vector<Value> items = a.items();
      items.insert(items.end(), b.items().begin(), b.items().end());
      rt.step(static_cast<int64_t>(items.size()));
      return rt.list(std::move(items), a.kind());
    }
    if (a.is_string()) fail("can only concatenate str (not \"{}\") to str", type_name(b));
    if (a.is_list()) {
      fail("can only concatenate {0} (not \"{1}\") to {0}", type_name(a), type_name(b));
    }
  }
  if (op == BinaryOp::kMul) {
    if ((a.is_string() || a.is_list()) && b.is_int()) return repeat(rt, a, b.as_int());
    if ((b.is_string() || b.is_list()) && a.is_int()) return repeat(rt, b, a.as_int());
  }
  fail("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op), type_name(a), type_name(b));
}

Value negate(Runtime& rt, const Value& v) {
  need_defined(v);
  if (v.is_integer()) return from_big(rt, -to_big(v));
  if (v.is(Kind::kFloat)) return Value(-v.as_float());
  fail("bad operand type for unary -: '{}'", type_name(v));
}

}  // namespace freshet::jinja

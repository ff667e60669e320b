// Python's int(), float() and round().
#pragma once

#include <cstdint>
#include <optional>

#include "tokenizer/template/big_int.h"
#include "tokenizer/template/runtime.h"

namespace freshet::jinja {

// As in the filters: text that is not an integer is tried as a float; nullopt if that fails too.
std::optional<Value> to_int(Runtime& rt, const Value& v, int64_t base);
std::optional<double> to_float(const Value& v);
// An integer of any size as a BigInt, and a BigInt as a value. REQUIRES: v.is_integer()
BigInt to_big(const Value& v);
Value from_big(Runtime& rt, const BigInt& v);
// The float nearest to a number; infinite if out of range. REQUIRES: a number
double nearest_float(const Value& v);
// round(v, digits) of an integer of any size or a float: half to even, by the exact decimal value;
// an int stays an int.
Value round_number(Runtime& rt, const Value& v, int digits);

}  // namespace freshet::jinja

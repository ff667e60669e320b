// Python's int(), float() and round().
#pragma once

#include <cstdint>
#include <optional>

#include "tokenizer/template/big_int.h"
#include "tokenizer/template/runtime.h"

namespace freshet::jinja {

// As the filters do it: text that is no integer is tried as a float; nullopt if that fails too.
std::optional<Value> to_int(Runtime& rt, const Value& v, int64_t base);
std::optional<double> to_float(const Value& v);
// An integer of any size, and one as a value. REQUIRES: v.is_integer()
BigInt to_big(const Value& v);
Value from_big(Runtime& rt, const BigInt& v);
// A number's nearest float; infinite where there is none. REQUIRES: a number
double nearest_float(const Value& v);
// round(v, digits) of an integer of any size or a float: to even, by the exact decimal value; an
// int stays an int.
Value round_number(Runtime& rt, const Value& v, int digits);

}  // namespace freshet::jinja

// Python's int(), float() and round().
#pragma once

#include <cstdint>
#include <optional>

#include "tokenizer/template/value.h"

namespace freshet::jinja {

// As the filters do it: text that is no integer is tried as a float; nullopt if that fails too.
std::optional<int64_t> to_int(const Value& v, int64_t base);
std::optional<double> to_float(const Value& v);
// round(v, digits): to even, by the exact decimal value; an int stays an int.
Value round_number(const Value& v, int digits);

}  // namespace freshet::jinja

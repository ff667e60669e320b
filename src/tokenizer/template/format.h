// Python's two kinds of string formatting: "%s of %d" % values and "{} of {:>3}".format(values).
#pragma once

#include <string_view>

#include "tokenizer/template/runtime.h"

namespace freshet::jinja {

// `values` is a tuple, a dict for %(name)s, or a single value.
Value format_percent(Runtime& rt, const Value& format, const Value& values);
Value format_braces(Runtime& rt, const Value& format, const Args& args);
// format(number, ".2f") for a float: `precision` digits after the point, rounded half to even.
std::string fixed(double v, int precision);

}  // namespace freshet::jinja

// Decimal numbers, as JSON writes them without an exponent: ranges and multiples as Languages.
//
// Exact: bounds are the decimal digits of the schema, never a double. Pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "grammar/language.h"

namespace freshet::grammar {

struct Decimal {
  bool negative = false;  // false for zero
  std::string whole = "0";
  std::string fraction;  // without trailing zeros
  bool is_zero() const { return whole == "0" && fraction.empty(); }
};

// REQUIRES: a JSON number. nullopt: too many digits.
std::optional<Decimal> parse_decimal(std::string_view text);

// Numbers >= d and <= d; strict: > and <.
Result<Language> decimals_above(const Decimal& d, bool strict);
Result<Language> decimals_below(const Decimal& d, bool strict);
Result<Language> multiples_of(const Decimal& d);
Result<Language> all_decimals();
// Trailing zeros after the point allowed, or none.
Result<Language> whole_decimals(bool fraction = true);

}  // namespace freshet::grammar

// The constraints of a conjunction of schema nodes on one string or number, as a Language.
//
// nullopt: unconstrained. Errors name the keyword and the location. Pure.
#pragma once

#include <optional>

#include "grammar/language.h"
#include "grammar/schema_document.h"

namespace freshet::grammar {

// Largest length or count that is expanded into states.
inline constexpr int64_t kMaxCount = 10'000;

struct CountRange {
  int64_t low = 0;
  int64_t high = -1;  // < 0: unbounded
  bool none() const { return high >= 0 && low > high; }
};
// The intersection of two counting keywords, e.g. minItems and maxItems.
Result<CountRange> count_range(const SchemaDocument& document, const NodeIds& nodes,
                               std::string_view least, std::string_view most,
                               int64_t largest = kMaxCount);

// `lengths` false: ignores minLength and maxLength.
Result<std::optional<Language>> string_language(const SchemaDocument& document,
                                                const NodeIds& nodes, bool lengths = true);
// `whole`: every number is an integer (a returned language already ensures it).
Result<std::optional<Language>> number_language(const SchemaDocument& document,
                                                const NodeIds& nodes, bool whole);
// Strings that contain a match of `pattern`, the value of a keyword at a node.
Result<Language> pattern_language(const SchemaDocument& document, int id, std::string_view keyword,
                                  const std::string& pattern);

// The regular expression of a format; nullptr: unknown format.
const char* format_expression(std::string_view format);
// Formats of the standard for which there is no expression.
bool is_unsupported_format(std::string_view format);

}  // namespace freshet::grammar

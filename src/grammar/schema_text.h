// What a conjunction of schema nodes says of one string or number, as a Language.
//
// nullopt: nothing. Errors name the keyword and the place. Pure.
#pragma once

#include <optional>

#include "grammar/language.h"
#include "grammar/schema_document.h"

namespace freshet::grammar {

inline constexpr int64_t kMaxCount = 10'000;  // of a length or count that is spelled out in states

struct CountRange {
  int64_t low = 0;
  int64_t high = -1;  // < 0: unbounded
  bool none() const { return high >= 0 && low > high; }
};
// The common range of two counting keywords, e.g. minItems and maxItems.
Result<CountRange> count_range(const SchemaDocument& document, const NodeIds& nodes,
                               std::string_view least, std::string_view most,
                               int64_t largest = kMaxCount);

// Without `lengths`: as if minLength and maxLength were absent.
Result<std::optional<Language>> string_language(const SchemaDocument& document,
                                                const NodeIds& nodes, bool lengths = true);
// `whole`: every number is an integer (already part of a language that is returned).
Result<std::optional<Language>> number_language(const SchemaDocument& document,
                                                const NodeIds& nodes, bool whole);
// Strings in which `pattern`, the value of a keyword at a node, is found.
Result<Language> pattern_language(const SchemaDocument& document, int id, std::string_view keyword,
                                  const std::string& pattern);

// The regular expression of a format; nullptr: not one that we know.
const char* format_expression(std::string_view format);
// Formats of the standard that no expression is made for.
bool is_unsupported_format(std::string_view format);

}  // namespace freshet::grammar

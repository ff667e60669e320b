// Decides whether a value meets a schema; used for the values listed by enum and const.
//
// Use one checker per document, so that each list, pattern or range is parsed once, however many
// values are checked against it. Errors are keywords that neither this checker nor a grammar can
// handle. Recursion is bounded. Not synchronised.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "grammar/schema_branches.h"
#include "grammar/schema_text.h"

namespace freshet::grammar {

class ValueChecker {
 public:
  explicit ValueChecker(SchemaDocument& document) : document_(document) {}

  Result<bool> meets(int id, const json::Value& value, int depth = 0);

  // For the check of one node.
  SchemaDocument& document() { return document_; }
  // Whether `array`, a value of the document, contains `value`.
  bool lists(const json::Value& array, const json::Value& value);
  const Result<std::optional<Language>>& strings(int id);
  const Result<std::optional<Language>>& numbers(int id, bool whole);
  Result<const Language*> key_pattern(int id, const std::string& pattern);

 private:
  SchemaDocument& document_;
  std::unordered_map<const json::Value*, std::set<std::string>> lists_;
  std::map<int, Result<std::optional<Language>>> strings_;
  std::map<std::pair<int, bool>, Result<std::optional<Language>>> numbers_;
  std::map<std::string, Language> patterns_;
};

// The keys are equal if and only if the values are equal.
std::string canonical_text(const json::Value& value);
// A bit of TypeBit.
unsigned type_bit(const json::Value& value);
// The types allowed by the "type" keywords of the nodes, and whether numbers must be integers.
Result<unsigned> allowed_types(const SchemaDocument& document, const NodeIds& nodes, bool& whole);

}  // namespace freshet::grammar

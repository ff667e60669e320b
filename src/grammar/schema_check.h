// Whether a value meets a schema, decided outright: for the values that enum and const list.
//
// One checker a document, so that a list, a pattern or a range is read once, however many values
// are checked against it. Errors are those keywords that neither this nor a grammar can hold.
// Recursion is bounded. Not synchronised.
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
  // Whether `array`, a value of the document, holds `value`.
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

// Equal for values that are equal, and only for those.
std::string canonical_text(const json::Value& value);
// A bit of TypeBit.
unsigned type_bit(const json::Value& value);
// The types that the nodes' "type" allow, and whether numbers must be whole.
Result<unsigned> allowed_types(const SchemaDocument& document, const NodeIds& nodes, bool& whole);

}  // namespace freshet::grammar

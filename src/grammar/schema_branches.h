// The logic of a schema: conjunctions of nodes, expanded into alternatives.
//
// A goal is a list of nodes that must all hold. branches() rewrites it as alternatives without
// $ref, allOf, anyOf, oneOf, not, if, dependent*. Each alternative is a list of nodes; only their
// keywords about the value itself count. A goal that cannot be expressed this way is an error that
// names the keyword.
#pragma once

#include <functional>
#include <map>
#include <set>

#include "grammar/schema_document.h"

namespace freshet::grammar {

// Types as bits; an integer is a number to which the opposite of kNotWhole applies.
enum TypeBit : unsigned {
  kNullType = 1,
  kBooleanType = 2,
  kNumberType = 4,
  kStringType = 8,
  kArrayType = 16,
  kObjectType = 32,
  kAnyType = 63
};

class SchemaBranches {
 public:
  // `empty` returns true if no value at all can meet a goal (false: one may exist).
  SchemaBranches(SchemaDocument& document, std::function<bool(const NodeIds&)> empty)
      : document_(document), empty_(std::move(empty)) {}

  Result<std::vector<NodeIds>> branches(const NodeIds& goal);
  Status check_keywords(int id) const;

 private:
  struct Draft;
  using Alternatives = std::vector<NodeIds>;

  Status run(Draft draft, std::vector<NodeIds>& out);
  Status open(int id, Draft& draft);
  Status disjunctions(int id, Draft& draft);
  Status find_disjunctions(int id, Draft& draft);
  Result<Alternatives> one_of(int id);
  Status conditional(int id, Draft& draft);
  Status dependencies(int id, std::string_view keyword, Draft& draft);
  // The negation of the node.
  Result<Alternatives> negated(int id, int depth);
  Result<Alternatives> find_negated(int id, int depth);
  Result<Alternatives> negated_keyword(int id, const std::string& keyword, const json::Value& v,
                                       int depth);
  Result<Alternatives> negated_type(int id, const json::Value& v);
  Result<Alternatives> negated_bound(int id, const std::string& keyword, const json::Value& v);
  int write(int origin, std::initializer_list<std::pair<std::string_view, json::Value>> members);
  Result<NodeIds> children(int id, std::string_view keyword);

  SchemaDocument& document_;
  size_t drafts_ = 0;  // number of alternatives examined so far
  std::function<bool(const NodeIds&)> empty_;
  std::map<int, std::vector<Alternatives>> choices_;  // nodes already opened
  std::map<int, Alternatives> negated_;
  std::set<int> negating_;
};

bool is_annotation(std::string_view keyword);

}  // namespace freshet::grammar

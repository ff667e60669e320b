// Schemas to rules: the parts that json_schema.cc, schema_object.cc and schema_array.cc share.
//
// A rule stands for a goal, the list of nodes that one value must meet; goals are found again by
// that list, which is what ends recursion. One compiler a document; several may add to the same
// rules, and each reference stays within its own document. Not synchronised.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "grammar/language.h"
#include "grammar/schema_branches.h"
#include "grammar/schema_check.h"
#include "grammar/schema_text.h"

namespace freshet::grammar {

// The rules of one grammar, and those that all of its documents use.
struct SchemaRules {
  struct Basics {
    int indent = -1, string = 0, integer = 0, number = 0, value = 0, object = 0, array = 0;
  };
  RuleSet rules;
  Basics basics[2];                                              // by whether 1.0 is no integer
  std::map<std::tuple<int64_t, int64_t, bool>, int> characters;  // of so many characters
};

// What may stand between the tokens of JSON.
Expression json_space(const SchemaRules& shared);
// `name: value`, with that space.
Expression json_member(const SchemaRules& shared, Expression key, Expression value);

class SchemaCompiler {
 public:
  SchemaCompiler(const json::Value& root, SchemaRules& shared);
  // What the document's root allows; `object`: of that, the objects.
  Result<Expression> compile(bool object = false);

 private:
  // One property of a conjunction of object schemas.
  struct Property {
    std::string name;
    NodeIds goal;
    bool required = false;
    Expression member;  // key, colon, value
  };
  // Objects of one alternative, while their rules are made.
  struct Members {
    std::vector<Property> properties;  // in the schema's order
    std::optional<Expression> extra;   // any other member
    CountRange count;
    int64_t cap = 1;  // counts beyond are all alike
    size_t look_ahead = 0;
    std::map<std::pair<size_t, int64_t>, int>
        after;  // rules by (properties passed, members so far)
    std::map<std::pair<size_t, int64_t>, int> then;
  };

  void add_basics();
  Expression space() const { return json_space(shared_); }
  Expression comma() const { return sequence({space(), literal(","), space()}); }
  Expression member(Expression key, Expression value) const {
    return json_member(shared_, std::move(key), std::move(value));
  }
  Expression braces(char open, Expression inner, char close) const;
  Expression list_of(const Expression& item, int64_t min, int64_t max) const;
  Status check_size() const;
  int add_rule(std::string name, Expression body) {
    return rules_.add(std::move(name), std::move(body));
  }
  std::string numbered(const char* name) const;

  // A goal, as a reference to its rule or (when small) as it is.
  Result<Expression> goal(const NodeIds& nodes);
  Result<Expression> body(const NodeIds& nodes);
  Result<Expression> branch(const NodeIds& nodes);
  Result<Expression> of_type(unsigned type, const NodeIds& nodes, bool whole);
  Result<Expression> string(const NodeIds& nodes);
  Expression sized_string(CountRange length);
  Expression characters(CountRange length, bool closed);
  Result<std::optional<Expression>> listed(const NodeIds& nodes);
  Result<Expression> constant(const json::Value& v, int depth) const;

  // Whether no value meets the goal, as far as one can tell at once.
  bool is_empty(const NodeIds& nodes);
  Result<bool> branch_is_empty(const NodeIds& nodes);
  Result<bool> object_is_empty(const NodeIds& nodes);
  Result<bool> number_is_empty(const NodeIds& nodes, bool whole);

  // --- objects (schema_object.cc) ---
  Result<Expression> object(const NodeIds& nodes);
  Result<std::vector<Property>> properties(const NodeIds& nodes);
  Result<NodeIds> property_goal(const NodeIds& nodes, const std::string& name);
  Result<std::vector<std::string>> required_names(const NodeIds& nodes) const;
  Result<bool> key_allowed(const NodeIds& nodes, const std::string& name);
  const json::Value* rest_schema(int id, std::string_view& keyword) const;
  Result<std::optional<Expression>> extra_member(const NodeIds& nodes,
                                                 const std::vector<Property>& named);
  Result<std::vector<std::pair<Language, NodeIds>>> key_classes(const NodeIds& nodes);
  Result<Language> key_language(const NodeIds& nodes, const std::vector<Property>& named);
  Result<Expression> members(Members m);
  int after(Members& m, size_t at, int64_t count);
  int then(Members& m, size_t at, int64_t count);
  Expression choices_from(Members& m, size_t at, int64_t count);

  // --- arrays (schema_array.cc) ---
  Result<Expression> array(const NodeIds& nodes);
  Result<NodeIds> item_goal(const NodeIds& nodes, size_t index, bool& never_there);
  Result<size_t> heads_of(const NodeIds& nodes) const;
  Expression elements(const std::vector<Expression>& heads, const Expression& item,
                      const CountRange& count);

  SchemaDocument document_;
  SchemaBranches branches_;
  ValueChecker checker_;
  SchemaRules& shared_;
  RuleSet& rules_;
  SchemaRules::Basics& basic_;
  std::map<NodeIds, int> goals_;
  std::vector<std::pair<int, NodeIds>> pending_;
  std::map<int, Expression> inline_;  // goals whose rule is a trifle
  int depth_ = 0;
  int empty_depth_ = 0;
};

}  // namespace freshet::grammar

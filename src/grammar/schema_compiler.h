// Schemas to rules: the parts that json_schema.cc, schema_object.cc and schema_array.cc share.
//
// A rule stands for a goal, the list of nodes that one value must meet; goals are found again by
// that list, which is what ends recursion. One compiler per schema; not synchronised.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "grammar/language.h"
#include "grammar/schema_branches.h"
#include "grammar/schema_text.h"

namespace freshet::grammar {

class SchemaCompiler {
 public:
  explicit SchemaCompiler(const json::Value& root);
  Result<RuleSet> compile();

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
    std::map<std::pair<size_t, int64_t>, int>
        after;  // rules by (properties passed, members so far)
    std::map<std::pair<size_t, int64_t>, int> then;
  };

  void add_basics();
  Expression space() const;
  Expression comma() const { return sequence({space(), literal(","), space()}); }
  Expression member(Expression key, Expression value) const;
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
  Result<const Language*> key_pattern(int id, const std::string& pattern);
  Result<Expression> members(Members m);
  int after(Members& m, size_t at, int64_t count);
  int then(Members& m, size_t at, int64_t count);
  Expression choices_from(Members& m, size_t at, int64_t count);

  // --- arrays (schema_array.cc) ---
  Result<Expression> array(const NodeIds& nodes);
  Result<NodeIds> item_goal(const NodeIds& nodes, size_t index, bool& never_there);
  Result<size_t> heads_of(const NodeIds& nodes) const;
  Expression elements(const std::vector<Expression>& heads, const Expression& item,
                      const CountRange& count) const;

  SchemaDocument document_;
  SchemaBranches branches_;
  RuleSet rules_;
  std::map<NodeIds, int> goals_;
  std::vector<std::pair<int, NodeIds>> pending_;
  std::map<int, Expression> inline_;  // goals whose rule is a trifle
  std::map<std::string, Language> patterns_;
  std::map<std::tuple<int64_t, int64_t, bool>, int> characters_;  // rules of so many characters
  int depth_ = 0;
  int empty_depth_ = 0;
  int indent_ = 0, string_ = 0, integer_ = 0, number_ = 0, value_ = 0, object_ = 0, array_ = 0;
};

}  // namespace freshet::grammar

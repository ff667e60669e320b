// Schemas to rules: the parts shared by json_schema.cc, schema_object.cc and schema_array.cc.
//
// A rule stands for a goal, the list of nodes that one value must meet. Rules are looked up by this
// list, which makes recursion end. There is one compiler per document; several compilers may add to
// the same rules, and each reference stays within its own document. Not synchronised.
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

// The rules of one grammar, including those shared by all of its documents.
struct SchemaRules {
  struct Basics {
    int indent = -1, string = 0, integer = 0, number = 0, value = 0, object = 0, array = 0;
  };
  RuleSet rules;
  // index: whether 1.0 is not an integer
  Basics basics[2];
  std::map<std::tuple<int64_t, int64_t, bool>, int> characters;  // key: number of characters
};

// The white space allowed between JSON tokens.
Expression json_space(const SchemaRules& shared);
// `name: value`, with white space around the colon.
Expression json_member(const SchemaRules& shared, Expression key, Expression value);

class SchemaCompiler {
 public:
  SchemaCompiler(const json::Value& root, SchemaRules& shared);
  // The values that the root of the document allows; `object`: only the objects among them.
  Result<Expression> compile(bool object = false);

 private:
  // One property of a conjunction of object schemas.
  struct Property {
    std::string name;
    NodeIds goal;
    bool required = false;
    Expression member;  // key, colon, value
  };
  // State of one alternative's objects while their rules are made.
  struct Members {
    std::vector<Property> properties;  // in the schema's order
    std::optional<Expression> extra;   // any other member
    CountRange count;
    int64_t cap = 1;  // higher counts are equivalent
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

  // A goal, as a reference to its rule or (if small) inline.
  Result<Expression> goal(const NodeIds& nodes);
  Result<Expression> body(const NodeIds& nodes);
  Result<Expression> branch(const NodeIds& nodes);
  Result<Expression> of_type(unsigned type, const NodeIds& nodes, bool whole);
  Result<Expression> string(const NodeIds& nodes);
  Expression sized_string(CountRange length);
  Expression characters(CountRange length, bool closed);
  Result<std::optional<Expression>> listed(const NodeIds& nodes);
  Result<Expression> constant(const json::Value& v, int depth) const;

  // Whether no value meets the goal, as far as a quick check can tell.
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
  std::map<int, Expression> inline_;  // goals whose rule is small
  int depth_ = 0;
  int empty_depth_ = 0;
};

}  // namespace freshet::grammar

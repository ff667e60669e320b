#include "grammar/json_schema.h"

#include <algorithm>
#include <utility>

#include "grammar/decimal_range.h"
#include "grammar/schema_compiler.h"

namespace freshet::grammar {
namespace {

constexpr int kMaxGoalDepth = 32;  // nested goals; deeper ones are queued
constexpr int kMaxConstantDepth = 64;
constexpr int kMaxEmptyDepth = 4;
constexpr int kMaxRules = 50'000;
constexpr int kMaxIndent = 40;
constexpr int64_t kBlock = 512;                   // characters counted in one rule
constexpr int64_t kMaxStringLength = 10'000'000;  // limit of maxLength if it is the only constraint

bool is_small(const Expression& e) {
  if (e.kind == Expression::Kind::kRule) return true;
  if (e.kind == Expression::Kind::kLiteral) return e.literal.size() <= 16;
  return e.kind == Expression::Kind::kChoice && e.children.size() <= 4 &&
         std::all_of(e.children.begin(), e.children.end(), [](const Expression& c) {
           return c.kind == Expression::Kind::kLiteral && c.literal.size() <= 8;
         });
}

}  // namespace

Expression json_space(const SchemaRules& shared) {
  const int indent = shared.basics[shared.basics[0].indent < 0 ? 1 : 0].indent;
  return choice({empty(), literal(" "), sequence({literal("\n"), rule_ref(indent)})});
}

Expression json_member(const SchemaRules& shared, Expression key, Expression value) {
  return sequence(
      {std::move(key), json_space(shared), literal(":"), json_space(shared), std::move(value)});
}

SchemaCompiler::SchemaCompiler(const json::Value& root, SchemaRules& shared)
    : document_(root),
      branches_(document_, [this](const NodeIds& g) { return is_empty(g); }),
      checker_(document_),
      shared_(shared),
      rules_(shared.rules),
      basic_(shared.basics[document_.integers_have_no_fraction() ? 1 : 0]) {
  if (basic_.indent < 0) add_basics();
}

Result<Expression> SchemaCompiler::compile(bool object) {
  FRESHET_RETURN_IF_ERROR(document_.status());
  NodeIds root = {document_.root()};
  if (object) {
    json::Object is_object;
    is_object["type"] = "object";
    root.push_back(document_.write(document_.root(), json::Value(std::move(is_object))));
  }
  FRESHET_ASSIGN_OR_RETURN(Expression e, goal(root));
  while (!pending_.empty()) {
    const auto [rule, nodes] = std::move(pending_.back());
    pending_.pop_back();
    FRESHET_ASSIGN_OR_RETURN(Expression later, body(nodes));
    rules_.define(rule, std::move(later));
  }
  return e;
}

Status SchemaCompiler::check_size() const {
  if (rules_.size() > kMaxRules) return resource_exhausted("JSON schema: too large");
  return {};
}

std::string SchemaCompiler::numbered(const char* name) const {
  return std::string(name) + ":" + std::to_string(rules_.size());
}

// --- the parts of JSON ---

void SchemaCompiler::add_basics() {
  const Expression digit = char_class({{'0', '9'}});
  basic_.indent = add_rule("indent", repeat(char_class({{' ', ' '}, {'\t', '\t'}}), 0, kMaxIndent));
  basic_.string = add_rule(
      "string", sequence({literal("\""), language_in_json_string(Language::of_length(0, -1)),
                          literal("\"")}));
  const Expression integer = sequence(
      {optional(literal("-")),
       choice({literal("0"), sequence({char_class({{'1', '9'}}), repeat(digit, 0, -1)})})});
  const Expression zeros = document_.integers_have_no_fraction()
                               ? empty()
                               : optional(sequence({literal("."), repeat(literal("0"), 1, -1)}));
  basic_.integer = add_rule("integer", sequence({integer, zeros}));
  basic_.number = add_rule(
      "number", sequence({integer, optional(sequence({literal("."), repeat(digit, 1, -1)})),
                          optional(sequence({char_class({{'e', 'e'}, {'E', 'E'}}),
                                             optional(char_class({{'+', '+'}, {'-', '-'}})),
                                             repeat(digit, 1, -1)}))}));
  basic_.value = rules_.add("value");
  basic_.object = rules_.add("object");
  basic_.array = rules_.add("array");
  rules_.define(basic_.value, choice({rule_ref(basic_.object), rule_ref(basic_.array),
                                      rule_ref(basic_.string), rule_ref(basic_.number),
                                      literal("true"), literal("false"), literal("null")}));
  rules_.define(
      basic_.object,
      braces('{', list_of(member(rule_ref(basic_.string), rule_ref(basic_.value)), 0, -1), '}'));
  rules_.define(basic_.array, braces('[', list_of(rule_ref(basic_.value), 0, -1), ']'));
}

Expression SchemaCompiler::braces(char open, Expression inner, char close) const {
  return sequence({literal(std::string(1, open)), space(), std::move(inner), space(),
                   literal(std::string(1, close))});
}

// min to max items, separated by commas.
Expression SchemaCompiler::list_of(const Expression& item, int64_t min, int64_t max) const {
  if (max == 0) return empty();
  Expression more =
      repeat(sequence({comma(), item}), static_cast<int>(std::max<int64_t>(0, min - 1)),
             max < 0 ? -1 : static_cast<int>(max - 1));
  Expression all = sequence({item, std::move(more)});
  return min > 0 ? all : optional(std::move(all));
}

// --- goals ---

Result<Expression> SchemaCompiler::goal(const NodeIds& nodes) {
  FRESHET_RETURN_IF_ERROR(check_size());
  const auto [it, fresh] = goals_.try_emplace(nodes, 0);
  if (!fresh) {
    const auto small = inline_.find(it->second);
    return small != inline_.end() ? small->second : rule_ref(it->second);
  }
  const int rule = it->second = rules_.add(numbered("goal"));
  if (depth_ >= kMaxGoalDepth) {
    pending_.emplace_back(rule, nodes);
    return rule_ref(rule);
  }
  ++depth_;
  auto made = body(nodes);
  --depth_;
  if (!made.ok()) return made.status();
  if (is_small(*made) && !(made->kind == Expression::Kind::kRule && made->rule == rule))
    inline_.emplace(rule, *made);
  rules_.define(rule, *made);
  const auto small = inline_.find(rule);
  return small != inline_.end() ? small->second : rule_ref(rule);
}

Result<Expression> SchemaCompiler::body(const NodeIds& nodes) {
  FRESHET_ASSIGN_OR_RETURN(const auto alternatives, branches_.branches(nodes));
  if (alternatives.size() == 1) return branch(alternatives.front());
  // Alternatives that occur in other goals too share their rules.
  std::vector<Expression> parts;
  for (const NodeIds& alternative : alternatives) {
    FRESHET_ASSIGN_OR_RETURN(Expression e, branch(alternative));
    parts.push_back(std::move(e));
  }
  return choice(std::move(parts));
}

Result<Expression> SchemaCompiler::branch(const NodeIds& nodes) {
  if (nodes.empty()) return rule_ref(basic_.value);
  FRESHET_ASSIGN_OR_RETURN(auto values, listed(nodes));
  if (values) return std::move(*values);
  bool whole = false;
  FRESHET_ASSIGN_OR_RETURN(const unsigned types, allowed_types(document_, nodes, whole));
  std::vector<Expression> parts;
  for (unsigned type = 1; type <= kObjectType; type <<= 1) {
    if ((types & type) == 0) continue;
    FRESHET_ASSIGN_OR_RETURN(Expression e, of_type(type, nodes, whole));
    parts.push_back(std::move(e));
  }
  return choice(std::move(parts));
}

Result<Expression> SchemaCompiler::of_type(unsigned type, const NodeIds& nodes, bool whole) {
  json::Array forbidden;
  for (const int id : nodes) {
    const json::Value* v = document_.find(id, kNotValues);
    if (v == nullptr || !document_.node(id).written || !v->is_array()) continue;
    for (const json::Value& one : v->as_array()) {
      if (type_bit(one) == type) forbidden.push_back(one);
    }
    if ((type == kArrayType || type == kObjectType) && !forbidden.empty())
      return document_.unsupported_keyword(id, "not", "of an array or object that is listed");
  }
  const auto listed_out = [&](const json::Value& v) {
    return std::find(forbidden.begin(), forbidden.end(), v) != forbidden.end();
  };
  switch (type) {
    case kNullType:
      return listed_out(nullptr) ? never() : literal("null");
    case kBooleanType: {
      std::vector<Expression> parts;
      for (const bool b : {true, false}) {
        if (!listed_out(b)) parts.push_back(literal(b ? "true" : "false"));
      }
      return choice(std::move(parts));
    }
    case kNumberType: {
      FRESHET_ASSIGN_OR_RETURN(auto language, number_language(document_, nodes, whole));
      if (!language) return rule_ref(whole ? basic_.integer : basic_.number);
      return language_text(std::move(*language));
    }
    case kStringType:
      return string(nodes);
    case kArrayType:
      return array(nodes);
    default:
      return object(nodes);
  }
}

Result<Expression> SchemaCompiler::string(const NodeIds& nodes) {
  FRESHET_ASSIGN_OR_RETURN(const auto free, string_language(document_, nodes, false));
  if (!free) {
    FRESHET_ASSIGN_OR_RETURN(const CountRange length, count_range(document_, nodes, "minLength",
                                                                  "maxLength", kMaxStringLength));
    return sized_string(length);
  }
  FRESHET_ASSIGN_OR_RETURN(auto language, string_language(document_, nodes));
  if (language->empty()) return never();
  return sequence({literal("\""), language_in_json_string(std::move(*language)), literal("\"")});
}

// This many characters, as a rule shared by all strings of that length. The closing quote, if any,
// belongs to the rule, so the states before it do not depend on a caller.
Expression SchemaCompiler::characters(CountRange length, bool closed) {
  const auto [it, fresh] = shared_.characters.try_emplace({length.low, length.high, closed}, 0);
  if (fresh) {
    Expression e = language_in_json_string(Language::of_length(length.low, length.high));
    if (closed) e = sequence({std::move(e), literal("\"")});
    it->second = add_rule(numbered("characters"), std::move(e));
  }
  return rule_ref(it->second);
}

// Long strings are counted in blocks: full ones, then a partial one.
Expression SchemaCompiler::sized_string(CountRange length) {
  if (length.none()) return never();
  if (length.low == 0 && length.high < 0) return rule_ref(basic_.string);
  const Expression quote = literal("\"");
  if (std::max(length.low, length.high) <= 2 * kBlock)
    return sequence({quote, characters(length, true)});
  const auto blocks = [&](int64_t min, int64_t max) {
    return repeat(characters({kBlock, kBlock}, false), static_cast<int>(min),
                  static_cast<int>(max));
  };
  const int64_t sure = length.low / kBlock;
  const int64_t least = length.low - sure * kBlock;
  if (length.high < 0) return sequence({quote, blocks(sure, sure), characters({least, -1}, true)});
  const int64_t most = length.high - sure * kBlock;
  const int64_t full = most / kBlock;
  std::vector<Expression> parts;
  if (full == 0) {
    parts.push_back(characters({least, most}, true));
  } else {
    const Expression rest = characters({0, kBlock - 1}, true);
    parts.push_back(characters({least, kBlock - 1}, true));
    if (full > 1) parts.push_back(sequence({blocks(1, full - 1), rest}));
    parts.push_back(sequence({blocks(full, full), characters({0, most - full * kBlock}, true)}));
  }
  return sequence({quote, blocks(sure, sure), choice(std::move(parts))});
}

// The values of enum and const that meet all the nodes; nullopt: no values are listed.
Result<std::optional<Expression>> SchemaCompiler::listed(const NodeIds& nodes) {
  json::Array values;
  const auto has_list = std::find_if(nodes.begin(), nodes.end(), [&](int id) {
    return document_.find(id, "const") != nullptr || document_.find(id, "enum") != nullptr;
  });
  if (has_list == nodes.end()) return std::optional<Expression>();
  if (const json::Value* c = document_.find(*has_list, "const")) {
    values.push_back(*c);
  } else {
    const json::Value* e = document_.find(*has_list, "enum");
    if (!e->is_array()) return document_.error(*has_list, "enum", "must be an array");
    values = e->as_array();
  }
  std::vector<Expression> parts;
  for (const json::Value& v : values) {
    bool good = true;
    for (const int id : nodes) {
      if (!good) break;
      FRESHET_ASSIGN_OR_RETURN(good, checker_.meets(id, v));
    }
    if (!good) continue;
    FRESHET_ASSIGN_OR_RETURN(Expression e, constant(v, 0));
    parts.push_back(std::move(e));
  }
  return std::optional<Expression>(choice(std::move(parts)));
}

Result<Expression> SchemaCompiler::constant(const json::Value& v, int depth) const {
  if (depth > kMaxConstantDepth)
    return invalid_argument("JSON schema: a constant nested deeper than {}", kMaxConstantDepth);
  if (v.is_string()) return quoted_json(v.as_string());
  std::vector<Expression> parts;
  if (v.is_array()) {
    for (const json::Value& e : v.as_array()) {
      if (!parts.empty()) parts.push_back(comma());
      FRESHET_ASSIGN_OR_RETURN(Expression item, constant(e, depth + 1));
      parts.push_back(std::move(item));
    }
    return braces('[', sequence(std::move(parts)), ']');
  }
  if (v.is_object()) {
    for (const auto& [key, value] : v.as_object()) {
      if (!parts.empty()) parts.push_back(comma());
      FRESHET_ASSIGN_OR_RETURN(Expression item, constant(value, depth + 1));
      parts.push_back(member(quoted_json(key), std::move(item)));
    }
    return braces('{', sequence(std::move(parts)), '}');
  }
  return literal(json::write(v));
}

// --- emptiness ---

bool SchemaCompiler::is_empty(const NodeIds& nodes) {
  if (empty_depth_ >= kMaxEmptyDepth) return false;
  ++empty_depth_;
  const auto alternatives = branches_.branches(nodes);
  bool all_empty = alternatives.ok();
  for (size_t i = 0; all_empty && i < alternatives->size(); ++i) {
    const auto one = branch_is_empty((*alternatives)[i]);
    all_empty = one.ok() && *one;
  }
  --empty_depth_;
  return all_empty;
}

Result<bool> SchemaCompiler::branch_is_empty(const NodeIds& nodes) {
  if (nodes.empty()) return false;
  FRESHET_ASSIGN_OR_RETURN(const auto values, listed(nodes));
  if (values) return values->kind == Expression::Kind::kChoice && values->children.empty();
  bool whole = false;
  FRESHET_ASSIGN_OR_RETURN(const unsigned types, allowed_types(document_, nodes, whole));
  if ((types & (kNullType | kBooleanType)) != 0) return false;
  if ((types & kStringType) != 0) {
    FRESHET_ASSIGN_OR_RETURN(const auto language, string_language(document_, nodes));
    if (!language || !language->empty()) return false;
  }
  if ((types & kNumberType) != 0) {
    FRESHET_ASSIGN_OR_RETURN(const bool none, number_is_empty(nodes, whole));
    if (!none) return false;
  }
  if ((types & kArrayType) != 0) {
    FRESHET_ASSIGN_OR_RETURN(const CountRange count,
                             count_range(document_, nodes, "minItems", "maxItems"));
    if (!count.none()) return false;
  }
  return (types & kObjectType) == 0 ? Result<bool>(true) : object_is_empty(nodes);
}

Result<bool> SchemaCompiler::number_is_empty(const NodeIds& nodes, bool whole) {
  FRESHET_ASSIGN_OR_RETURN(const auto language, number_language(document_, nodes, whole));
  return language.has_value() && language->empty();
}

Result<RuleSet> json_schema_rules(const json::Value& schema) {
  SchemaRules shared;
  FRESHET_ASSIGN_OR_RETURN(Expression e, SchemaCompiler(schema, shared).compile());
  shared.rules.define(0, sequence({json_space(shared), std::move(e), json_space(shared)}));
  return std::move(shared.rules);
}

Result<RuleSet> tool_call_rules(const std::vector<CallableTool>& tools,
                                std::string_view arguments_key) {
  SchemaRules shared;
  const auto between = [&](std::string_view punctuation) {
    return sequence({json_space(shared), literal(punctuation), json_space(shared)});
  };
  json::Object none;
  none["maxProperties"] = 0;
  const json::Value no_parameters(std::move(none));
  std::vector<Expression> calls;
  for (const CallableTool& tool : tools) {
    const json::Value& schema = tool.parameters != nullptr ? *tool.parameters : no_parameters;
    auto arguments = SchemaCompiler(schema, shared).compile(/*object=*/true);
    if (!arguments.ok())
      return arguments.status().with_context(fmt::format("parameters of tool '{}'", tool.name));
    calls.push_back(
        sequence({literal("{"), json_space(shared),
                  json_member(shared, quoted_json("name"), quoted_json(tool.name)), between(","),
                  json_member(shared, quoted_json(arguments_key), std::move(arguments).value()),
                  json_space(shared), literal("}")}));
  }
  Expression any = choice(std::move(calls));
  shared.rules.define(0, sequence({json_space(shared), std::move(any), json_space(shared)}));
  return std::move(shared.rules);
}

}  // namespace freshet::grammar

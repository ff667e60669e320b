#include <algorithm>

#include "grammar/schema_compiler.h"

namespace freshet::grammar {
namespace {

constexpr size_t kHeadsInARule = 32;

// prefixItems and items, in either spelling; nullptr: any item.
struct Items {
  const json::Value* heads = nullptr;
  const json::Value* rest = nullptr;
  std::string_view heads_keyword = "prefixItems";
  std::string_view rest_keyword = "items";
};

Items items_of(const SchemaDocument& document, int id) {
  Items out{document.find(id, "prefixItems"), document.find(id, "items")};
  if (out.rest != nullptr && out.rest->is_array()) {
    out = {out.rest, document.find(id, "additionalItems"), "items", "additionalItems"};
  }
  if (out.rest == nullptr) {
    out.rest = document.find(id, "unevaluatedItems");
    out.rest_keyword = "unevaluatedItems";
  }
  return out;
}

}  // namespace

Result<size_t> SchemaCompiler::heads_of(const NodeIds& nodes) const {
  size_t most = 0;
  for (const int id : nodes) {
    const Items items = items_of(document_, id);
    if (items.heads == nullptr) continue;
    if (!items.heads->is_array())
      return document_.error(id, items.heads_keyword, "must be an array");
    most = std::max(most, items.heads->as_array().size());
  }
  return most;
}

// The schemas for the item at `index`.
Result<NodeIds> SchemaCompiler::item_goal(const NodeIds& nodes, size_t index, bool& never_there) {
  NodeIds goal;
  for (const int id : nodes) {
    const Items items = items_of(document_, id);
    const bool head = items.heads != nullptr && index < items.heads->as_array().size();
    const json::Value* schema = head ? &items.heads->as_array()[index] : items.rest;
    if (schema == nullptr) continue;
    if (schema->is_bool()) {
      never_there = never_there || !schema->as_bool();
      continue;
    }
    goal.push_back(
        document_.child(id, *schema,
                        head ? std::string(items.heads_keyword) + "/" + std::to_string(index)
                             : std::string(items.rest_keyword)));
  }
  return goal;
}

Result<Expression> SchemaCompiler::array(const NodeIds& nodes) {
  FRESHET_ASSIGN_OR_RETURN(CountRange count, count_range(document_, nodes, "minItems", "maxItems"));
  FRESHET_ASSIGN_OR_RETURN(const size_t heads, heads_of(nodes));
  std::vector<Expression> firsts;
  for (size_t i = 0; i <= heads; ++i) {
    const int64_t index = static_cast<int64_t>(i);
    if (count.high >= 0 && index >= count.high) break;
    bool never_there = false;
    FRESHET_ASSIGN_OR_RETURN(const NodeIds nodes_of_item, item_goal(nodes, i, never_there));
    if (never_there) {
      count.high = count.high < 0 ? index : std::min(count.high, index);
      break;
    }
    FRESHET_ASSIGN_OR_RETURN(Expression e, goal(nodes_of_item));
    firsts.push_back(std::move(e));
  }
  if (count.none()) return never();
  Expression item = never();
  if (firsts.size() == heads + 1) {
    item = std::move(firsts.back());
    firsts.pop_back();
  }
  const bool plain = firsts.empty() && count.low == 0 && count.high < 0;
  if (plain && item.kind == Expression::Kind::kRule && item.rule == basic_.value)
    return rule_ref(basic_.array);
  return braces('[', elements(firsts, item, count), ']');
}

// The heads in order, then items; between low and high elements in total.
Expression SchemaCompiler::elements(const std::vector<Expression>& heads, const Expression& item,
                                    const CountRange& count) {
  if (heads.empty()) return list_of(item, count.low, count.high);
  const int64_t done = static_cast<int64_t>(heads.size());
  Expression rest = empty();
  if (count.high < 0 || count.high > done) {
    rest =
        repeat(sequence({comma(), item}), static_cast<int>(std::max<int64_t>(0, count.low - done)),
               count.high < 0 ? -1 : static_cast<int>(count.high - done));
  }
  for (size_t i = heads.size(); i-- > 0;) {
    std::vector<Expression> parts;
    if (i > 0) parts.push_back(comma());
    parts.push_back(heads[i]);
    parts.push_back(std::move(rest));
    rest = sequence(std::move(parts));
    if (static_cast<int64_t>(i) >= count.low) rest = optional(std::move(rest));
    // Each one is nested in the one before: an occasional rule limits the nesting depth.
    if (i > 0 && i % kHeadsInARule == 0)
      rest = rule_ref(add_rule(numbered("items"), std::move(rest)));
  }
  return rest;
}

}  // namespace freshet::grammar

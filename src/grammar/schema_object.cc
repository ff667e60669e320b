#include <algorithm>

#include "grammar/schema_check.h"
#include "grammar/schema_compiler.h"

namespace freshet::grammar {
namespace {

constexpr size_t kLookAhead = 24;      // optional members expanded in one rule
constexpr size_t kShortLookAhead = 6;  // ... if the rules would need too many states
constexpr size_t kManyPlaces = 1024;
constexpr size_t kMaxPatterns = 6;      // of patternProperties in one conjunction
constexpr size_t kMaxPlaces = 100'000;  // properties times counts

}  // namespace

// additionalProperties or its equivalent.
const json::Value* SchemaCompiler::rest_schema(int id, std::string_view& keyword) const {
  for (const std::string_view name : {"additionalProperties", "unevaluatedProperties"}) {
    keyword = name;
    if (const json::Value* v = document_.find(id, name)) return v;
  }
  return nullptr;
}

Result<std::vector<std::string>> SchemaCompiler::required_names(const NodeIds& nodes) const {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const int id : nodes) {
    const json::Value* r = document_.find(id, "required");
    if (r == nullptr || r->is_bool()) continue;  // in draft 3 it was part of the property
    if (!r->is_array()) return document_.error(id, "required", "must be an array of strings");
    for (const json::Value& name : r->as_array()) {
      if (!name.is_string()) return document_.error(id, "required", "must be an array of strings");
      if (seen.insert(name.as_string()).second) names.push_back(name.as_string());
    }
  }
  return names;
}

Result<NodeIds> SchemaCompiler::property_goal(const NodeIds& nodes, const std::string& name) {
  NodeIds goal;
  for (const int id : nodes) {
    bool described = false;
    const json::Value* named = document_.find(id, "properties");
    if (const json::Value* own = named != nullptr ? named->find(name) : nullptr) {
      goal.push_back(document_.child(id, *own, "properties/" + name));
      described = true;
    }
    const json::Value* patterns = document_.find(id, "patternProperties");
    if (patterns != nullptr && patterns->is_object()) {
      for (const auto& [pattern, schema] : patterns->as_object()) {
        FRESHET_ASSIGN_OR_RETURN(const Language* keys, checker_.key_pattern(id, pattern));
        if (!keys->contains(name)) continue;
        goal.push_back(document_.child(id, schema, "patternProperties/" + pattern));
        described = true;
      }
    }
    std::string_view keyword;
    const json::Value* rest = described ? nullptr : rest_schema(id, keyword);
    if (rest != nullptr) goal.push_back(document_.child(id, *rest, keyword));
  }
  return goal;
}

Result<bool> SchemaCompiler::key_allowed(const NodeIds& nodes, const std::string& name) {
  for (const int id : nodes) {
    const json::Value* names = document_.find(id, "propertyNames");
    if (names == nullptr) continue;
    const int child = document_.child(id, *names, "propertyNames");
    FRESHET_ASSIGN_OR_RETURN(const bool good, checker_.meets(child, json::Value(name)));
    if (!good) return false;
  }
  return true;
}

// In schema order; names that are only in `required` come last.
Result<std::vector<SchemaCompiler::Property>> SchemaCompiler::properties(const NodeIds& nodes) {
  FRESHET_ASSIGN_OR_RETURN(const std::vector<std::string> required, required_names(nodes));
  const std::set<std::string> needed(required.begin(), required.end());
  std::vector<Property> out;
  std::set<std::string> seen;
  const auto add = [&](const std::string& name) -> Status {
    if (!seen.insert(name).second) return {};
    FRESHET_ASSIGN_OR_RETURN(NodeIds goal, property_goal(nodes, name));
    FRESHET_ASSIGN_OR_RETURN(const bool allowed, key_allowed(nodes, name));
    if (!allowed) goal = {document_.write(nodes.front(), json::Value(false))};
    out.push_back({name, std::move(goal), needed.contains(name), {}});
    return {};
  };
  for (const int id : nodes) {
    const json::Value* named = document_.find(id, "properties");
    if (named == nullptr) continue;
    if (!named->is_object()) return document_.error(id, "properties", "must be an object");
    for (const auto& [name, sub] : named->as_object()) FRESHET_RETURN_IF_ERROR(add(name));
  }
  for (const std::string& name : required) FRESHET_RETURN_IF_ERROR(add(name));
  return out;
}

Result<Expression> SchemaCompiler::object(const NodeIds& nodes) {
  static constexpr std::string_view kKeywords[] = {
      "properties",    "required",      "patternProperties", "additionalProperties",
      "propertyNames", "minProperties", "maxProperties",     "unevaluatedProperties"};
  const bool free = std::none_of(nodes.begin(), nodes.end(), [&](int id) {
    return std::any_of(std::begin(kKeywords), std::end(kKeywords),
                       [&](std::string_view k) { return document_.find(id, k) != nullptr; });
  });
  if (free) return rule_ref(basic_.object);
  Members m;
  FRESHET_ASSIGN_OR_RETURN(m.count,
                           count_range(document_, nodes, "minProperties", "maxProperties"));
  FRESHET_ASSIGN_OR_RETURN(m.properties, properties(nodes));
  FRESHET_ASSIGN_OR_RETURN(m.extra, extra_member(nodes, m.properties));
  if (m.count.none()) return never();
  std::vector<Property> possible;
  for (Property& p : m.properties) {
    const bool impossible = std::any_of(p.goal.begin(), p.goal.end(), [&](int id) {
      return document_.schema(id).is_bool() && !document_.schema(id).as_bool();
    });
    if (impossible && p.required) return never();
    if (impossible) continue;
    FRESHET_ASSIGN_OR_RETURN(Expression value, goal(p.goal));
    p.member = member(quoted_json(p.name), std::move(value));
    possible.push_back(std::move(p));
  }
  m.properties = std::move(possible);
  return members(std::move(m));
}

// --- members that no property names ---

// Which schemas apply to which keys: the sets of patterns that a key may match, each with the
// language of the keys that match exactly this set.
Result<std::vector<std::pair<Language, NodeIds>>> SchemaCompiler::key_classes(
    const NodeIds& nodes) {
  std::vector<std::pair<int, std::string>> patterns;  // distinct, each with one node that has it
  for (const int id : nodes) {
    const json::Value* p = document_.find(id, "patternProperties");
    if (p == nullptr) continue;
    if (!p->is_object()) return document_.error(id, "patternProperties", "must be an object");
    for (const auto& [pattern, schema] : p->as_object()) {
      if (std::none_of(patterns.begin(), patterns.end(),
                       [&](const auto& known) { return known.second == pattern; }))
        patterns.emplace_back(id, pattern);
    }
  }
  if (patterns.size() > kMaxPatterns)
    return document_.unsupported_keyword(patterns.front().first, "patternProperties",
                                         "more than 6 patterns");
  std::vector<std::pair<Language, NodeIds>> classes;
  for (size_t set = 0; set < size_t{1} << patterns.size(); ++set) {
    Language keys = Language::of_length(0, -1);
    for (size_t i = 0; i < patterns.size() && !keys.empty(); ++i) {
      FRESHET_ASSIGN_OR_RETURN(const Language* one,
                               checker_.key_pattern(patterns[i].first, patterns[i].second));
      FRESHET_ASSIGN_OR_RETURN(keys,
                               (set >> i & 1) != 0 ? intersect(keys, *one) : subtract(keys, *one));
    }
    if (keys.empty()) continue;
    NodeIds goal;
    for (const int id : nodes) {
      bool described = false;
      const json::Value* own = document_.find(id, "patternProperties");
      for (size_t i = 0; own != nullptr && i < patterns.size(); ++i) {
        const json::Value* schema = (set >> i & 1) != 0 ? own->find(patterns[i].second) : nullptr;
        if (schema == nullptr) continue;
        goal.push_back(document_.child(id, *schema, "patternProperties/" + patterns[i].second));
        described = true;
      }
      std::string_view keyword;
      const json::Value* rest = described ? nullptr : rest_schema(id, keyword);
      if (rest != nullptr) goal.push_back(document_.child(id, *rest, keyword));
    }
    classes.emplace_back(std::move(keys), std::move(goal));
  }
  return classes;
}

// Keys that propertyNames allows and that are not properties.
Result<Language> SchemaCompiler::key_language(const NodeIds& nodes,
                                              const std::vector<Property>& named) {
  std::vector<std::string> taken;
  for (const Property& p : named) taken.push_back(p.name);
  FRESHET_ASSIGN_OR_RETURN(Language keys,
                           subtract(Language::of_length(0, -1), Language::of(taken)));
  NodeIds goal;
  for (const int id : nodes) {
    if (const json::Value* names = document_.find(id, "propertyNames"))
      goal.push_back(document_.child(id, *names, "propertyNames"));
  }
  if (goal.empty()) return keys;
  FRESHET_ASSIGN_OR_RETURN(const auto alternatives, branches_.branches(goal));
  if (alternatives.size() > 1)
    return document_.unsupported_keyword(nodes.front(), "propertyNames", "with alternatives");
  if (alternatives.empty()) return Language();
  const NodeIds& all = alternatives.front();
  bool whole = false;
  FRESHET_ASSIGN_OR_RETURN(const unsigned types, allowed_types(document_, all, whole));
  if ((types & kStringType) == 0) return Language();
  FRESHET_ASSIGN_OR_RETURN(const auto language, string_language(document_, all));
  if (language) {
    FRESHET_ASSIGN_OR_RETURN(keys, intersect(keys, *language));
  }
  for (const int id : all) {
    const json::Value* c = document_.find(id, "const");
    const json::Value* e = c != nullptr ? c : document_.find(id, "enum");
    if (e == nullptr) continue;
    std::vector<std::string> names;
    for (const json::Value& v : c != nullptr || !e->is_array() ? json::Array{*e} : e->as_array()) {
      if (v.is_string()) names.push_back(v.as_string());
    }
    FRESHET_ASSIGN_OR_RETURN(keys, intersect(keys, Language::of(names)));
  }
  return keys;
}

Result<std::optional<Expression>> SchemaCompiler::extra_member(const NodeIds& nodes,
                                                               const std::vector<Property>& named) {
  FRESHET_ASSIGN_OR_RETURN(const Language keys, key_language(nodes, named));
  FRESHET_ASSIGN_OR_RETURN(auto classes, key_classes(nodes));
  const bool any_key =
      classes.size() == 1 && named.empty() && std::none_of(nodes.begin(), nodes.end(), [&](int id) {
        return document_.find(id, "propertyNames") != nullptr;
      });
  std::vector<Expression> parts;
  for (auto& [own_keys, nodes_of_value] : classes) {
    const bool forbidden = std::any_of(nodes_of_value.begin(), nodes_of_value.end(), [&](int id) {
      return document_.schema(id).is_bool() && !document_.schema(id).as_bool();
    });
    if (forbidden) continue;
    FRESHET_ASSIGN_OR_RETURN(Language both, intersect(own_keys, keys));
    if (both.empty()) continue;
    FRESHET_ASSIGN_OR_RETURN(Expression value, goal(nodes_of_value));
    const bool free = any_key && both.states().size() == 1 && both.states()[0].accepts;
    Expression key =
        free ? rule_ref(basic_.string)
             : sequence({literal("\""), language_in_json_string(std::move(both)), literal("\"")});
    parts.push_back(member(std::move(key), std::move(value)));
  }
  if (parts.empty()) return std::optional<Expression>();
  return std::optional<Expression>(rule_ref(add_rule(numbered("extra"), choice(std::move(parts)))));
}

// --- the order of members ---

Result<Expression> SchemaCompiler::members(Members m) {
  if (m.properties.empty()) {
    if (!m.extra) return m.count.low > 0 ? never() : braces('{', empty(), '}');
    return braces('{', list_of(*m.extra, m.count.low, m.count.high), '}');
  }
  const int64_t needed = std::count_if(m.properties.begin(), m.properties.end(),
                                       [](const Property& p) { return p.required; });
  if (m.count.high >= 0 && needed > m.count.high) return never();
  if (!m.extra && m.count.high >= static_cast<int64_t>(m.properties.size())) m.count.high = -1;
  if (m.count.low <= needed) m.count.low = 0;
  m.cap = std::max<int64_t>({1, m.count.low, m.count.high});
  const size_t places = (m.properties.size() + 1) * static_cast<size_t>(m.cap + 1);
  m.look_ahead = places > kManyPlaces ? kShortLookAhead : kLookAhead;
  if (places > kMaxPlaces)
    return resource_exhausted(
        "JSON schema: too many combinations of properties and minProperties or maxProperties");
  // From last to first, so that no rule has to recurse to the following ones.
  for (size_t at = m.properties.size(); at > 0; --at) {
    for (int64_t count = 1; count <= std::min<int64_t>(m.cap, static_cast<int64_t>(at)); ++count)
      after(m, at, count);
  }
  Expression inner = choices_from(m, 0, 0);
  if (needed == 0 && m.count.low == 0) inner = optional(std::move(inner));
  return braces('{', std::move(inner), '}');
}

// The rule after a member: either nothing, or a comma and another member.
int SchemaCompiler::after(Members& m, size_t at, int64_t count) {
  count = std::min(count, m.cap);
  const auto [it, fresh] = m.after.try_emplace({at, count}, 0);
  if (!fresh) return it->second;
  const int rule = it->second = rules_.add(numbered("after"));
  const bool may_end =
      count >= m.count.low &&
      std::none_of(m.properties.begin() + static_cast<std::ptrdiff_t>(at), m.properties.end(),
                   [](const Property& p) { return p.required; });
  Expression more = sequence({comma(), choices_from(m, at, count)});
  rules_.define(rule, may_end ? optional(std::move(more)) : std::move(more));
  return rule;
}

int SchemaCompiler::then(Members& m, size_t at, int64_t count) {
  const auto [it, fresh] = m.then.try_emplace({at, count}, 0);
  if (!fresh) return it->second;
  const int rule = it->second = rules_.add(numbered("then"));
  rules_.define(rule, choices_from(m, at, count));
  return rule;
}

// One member from property `at` on, and everything after it. `count` members precede it.
Expression SchemaCompiler::choices_from(Members& m, size_t at, int64_t count) {
  std::vector<Expression> parts;
  if (m.count.high >= 0 && count >= m.count.high) return never();
  for (size_t i = at; i < m.properties.size(); ++i) {
    if (i - at >= m.look_ahead) {
      parts.push_back(rule_ref(then(m, i, count)));
      return choice(std::move(parts));
    }
    const Property& p = m.properties[i];
    parts.push_back(sequence({p.member, rule_ref(after(m, i + 1, count + 1))}));
    if (p.required) return choice(std::move(parts));
  }
  if (m.extra)
    parts.push_back(sequence({*m.extra, rule_ref(after(m, m.properties.size(), count + 1))}));
  return choice(std::move(parts));
}

Result<bool> SchemaCompiler::object_is_empty(const NodeIds& nodes) {
  FRESHET_ASSIGN_OR_RETURN(const CountRange count,
                           count_range(document_, nodes, "minProperties", "maxProperties"));
  if (count.none()) return true;
  FRESHET_ASSIGN_OR_RETURN(const std::vector<std::string> required, required_names(nodes));
  for (const std::string& name : required) {
    FRESHET_ASSIGN_OR_RETURN(const bool allowed, key_allowed(nodes, name));
    if (!allowed) return true;
    FRESHET_ASSIGN_OR_RETURN(const NodeIds goal, property_goal(nodes, name));
    if (is_empty(goal)) return true;
  }
  return false;
}

}  // namespace freshet::grammar

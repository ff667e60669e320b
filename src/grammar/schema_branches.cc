#include "grammar/schema_branches.h"

#include <algorithm>
#include <array>
#include <set>

namespace freshet::grammar {
namespace {

constexpr size_t kMaxBranches = 1024;
constexpr size_t kMaxOneOf = 128;
constexpr size_t kMaxDrafts = 300'000;  // for all goals; alternatives that turn out equal count too

}  // namespace

bool is_annotation(std::string_view keyword) {
  static const std::set<std::string_view> kAnnotations = {"$schema",
                                                          "$id",
                                                          "id",
                                                          "$defs",
                                                          "definitions",
                                                          "title",
                                                          "description",
                                                          "default",
                                                          "examples",
                                                          "$comment",
                                                          "deprecated",
                                                          "readOnly",
                                                          "writeOnly",
                                                          "$anchor",
                                                          "$vocabulary",
                                                          "contentEncoding",
                                                          "contentMediaType",
                                                          "contentSchema",
                                                          "$dynamicAnchor",
                                                          "$recursiveAnchor",
                                                          "example",
                                                          "discriminator"};
  return kAnnotations.contains(keyword);
}

struct SchemaBranches::Draft {
  NodeIds worklist;
  NodeIds done;  // in order of discovery
  std::set<int> seen;
  std::vector<Alternatives> choices;
  bool dead = false;
};

Result<std::vector<NodeIds>> SchemaBranches::branches(const NodeIds& goal) {
  Draft draft;
  draft.worklist.assign(goal.rbegin(), goal.rend());
  std::vector<NodeIds> out;
  FRESHET_RETURN_IF_ERROR(run(std::move(draft), out));
  return out;
}

Status SchemaBranches::run(Draft draft, std::vector<NodeIds>& out) {
  while (!draft.worklist.empty() && !draft.dead) {
    const int id = draft.worklist.back();
    draft.worklist.pop_back();
    if (draft.seen.insert(id).second) FRESHET_RETURN_IF_ERROR(open(id, draft));
  }
  if (draft.dead) return {};
  if (++drafts_ > kMaxDrafts)
    return resource_exhausted("JSON schema: its alternatives multiply: more than {} combinations",
                              kMaxDrafts);
  if (draft.choices.empty()) {
    if (out.size() >= kMaxBranches)
      return resource_exhausted("JSON schema: more than {} alternatives at {}", kMaxBranches,
                                draft.done.empty() ? "#" : document_.node(draft.done[0]).pointer);
    if (std::find(out.begin(), out.end(), draft.done) == out.end())
      out.push_back(std::move(draft.done));
    return {};
  }
  const Alternatives alternatives = std::move(draft.choices.back());
  draft.choices.pop_back();
  for (const NodeIds& nodes : alternatives) {
    Draft next = draft;
    next.worklist.assign(nodes.rbegin(), nodes.rend());
    FRESHET_RETURN_IF_ERROR(run(std::move(next), out));
  }
  return {};
}

// Keywords that constrain a value but cannot be compiled to a grammar.
Status SchemaBranches::check_keywords(int id) const {
  const json::Value& s = document_.schema(id);
  if (s.is_bool()) return {};
  if (!s.is_object())
    return invalid_argument("JSON schema: at {}: a schema must be an object or a boolean",
                            document_.node(id).pointer);
  for (const std::string_view keyword : kReferences) {
    if (!document_.is_static(id, keyword))
      return document_.unsupported_keyword(id, keyword, "several places have its anchor");
  }
  if (const json::Value* u = s.find("uniqueItems"); u != nullptr) {
    if (!u->is_bool()) return document_.error(id, "uniqueItems", "must be true or false");
    const json::Value* max = s.find("maxItems");
    if (u->as_bool() && !(max != nullptr && max->is_number() && max->as_double() <= 1))
      return document_.unsupported_keyword(id, "uniqueItems");
  }
  if (s.find("contains") != nullptr) {
    const json::Value* least = s.find("minContains");
    const bool none = least != nullptr && least->is_number() && least->as_double() == 0 &&
                      s.find("maxContains") == nullptr;
    if (!none) return document_.unsupported_keyword(id, "contains");
  }
  for (const char* keyword : {"unevaluatedProperties", "unevaluatedItems"}) {
    const json::Value* u = s.find(keyword);
    if (u == nullptr || (u->is_bool() && u->as_bool())) continue;
    // Alone in its node it is equivalent to additionalProperties or items.
    for (const char* other : {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas",
                              "$dynamicRef", "$recursiveRef", "contains"}) {
      if (s.find(other) != nullptr)
        return document_.unsupported_keyword(id, keyword, "beside '" + std::string(other) + "'");
    }
  }
  return {};
}

// Opens one node of a conjunction: its references join the draft, its alternatives are recorded.
Status SchemaBranches::open(int id, Draft& draft) {
  FRESHET_RETURN_IF_ERROR(check_keywords(id));
  const json::Value& s = document_.schema(id);
  if (s.is_bool()) {
    draft.dead = draft.dead || !s.as_bool();
    return {};
  }
  for (const std::string_view keyword : kReferences) {
    if (s.find(keyword) == nullptr) continue;
    FRESHET_ASSIGN_OR_RETURN(const int target, document_.resolve(id, keyword));
    draft.worklist.push_back(target);
    if (document_.ref_stands_alone() && !document_.node(id).written) return {};
  }
  const bool constrains =
      std::any_of(s.as_object().begin(), s.as_object().end(), [](const auto& member) {
        static const std::set<std::string_view> kLogic = {"$ref",
                                                          "$dynamicRef",
                                                          "$recursiveRef",
                                                          "allOf",
                                                          "anyOf",
                                                          "oneOf",
                                                          "not",
                                                          "if",
                                                          "then",
                                                          "else",
                                                          "dependentRequired",
                                                          "dependentSchemas",
                                                          "dependencies"};
        return !kLogic.contains(member.first) && !is_annotation(member.first);
      });
  if (constrains) draft.done.push_back(id);
  if (s.find("allOf") != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(const NodeIds parts, children(id, "allOf"));
    draft.worklist.insert(draft.worklist.end(), parts.rbegin(), parts.rend());
  }
  return disjunctions(id, draft);
}

Status SchemaBranches::disjunctions(int id, Draft& draft) {
  const auto known = choices_.find(id);
  if (known != choices_.end()) {
    draft.choices.insert(draft.choices.end(), known->second.begin(), known->second.end());
    return {};
  }
  const size_t before = draft.choices.size();
  FRESHET_RETURN_IF_ERROR(find_disjunctions(id, draft));
  choices_[id].assign(draft.choices.begin() + static_cast<std::ptrdiff_t>(before),
                      draft.choices.end());
  return {};
}

Status SchemaBranches::find_disjunctions(int id, Draft& draft) {
  const json::Value& s = document_.schema(id);
  if (s.find("anyOf") != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(const NodeIds parts, children(id, "anyOf"));
    Alternatives all;
    for (const int part : parts) all.push_back({part});
    draft.choices.push_back(std::move(all));
  }
  if (s.find("oneOf") != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(Alternatives all, one_of(id));
    draft.choices.push_back(std::move(all));
  }
  if (const json::Value* inner = s.find("not")) {
    FRESHET_ASSIGN_OR_RETURN(Alternatives all, negated(document_.child(id, *inner, "not"), 0));
    draft.choices.push_back(std::move(all));
  }
  FRESHET_RETURN_IF_ERROR(conditional(id, draft));
  for (const char* keyword : {"dependentRequired", "dependentSchemas", "dependencies"})
    FRESHET_RETURN_IF_ERROR(dependencies(id, keyword, draft));
  return {};
}

Result<NodeIds> SchemaBranches::children(int id, std::string_view keyword) {
  const json::Value& list = *document_.find(id, keyword);
  if (!list.is_array() || list.as_array().empty())
    return document_.error(id, keyword, "must be a non-empty array");
  NodeIds out;
  for (const json::Value& part : list.as_array()) {
    out.push_back(
        document_.child(id, part, std::string(keyword) + "/" + std::to_string(out.size())));
  }
  return out;
}

// Alternatives that exclude each other are treated as anyOf; if two might both hold, each also
// requires that the other does not.
Result<SchemaBranches::Alternatives> SchemaBranches::one_of(int id) {
  FRESHET_ASSIGN_OR_RETURN(const NodeIds parts, children(id, "oneOf"));
  if (parts.size() > kMaxOneOf)
    return resource_exhausted("JSON schema: 'oneOf' at {} has more than {} parts",
                              document_.node(id).pointer, kMaxOneOf);
  json::Value rest = document_.schema(id);
  NodeIds beside;  // the siblings, without branching keywords
  if (!document_.node(id).written) {
    for (const char* keyword :
         {"oneOf", "anyOf", "allOf", "not", "if", "then", "else", "$ref", "$dynamicRef",
          "$recursiveRef", "dependencies", "dependentSchemas", "dependentRequired", "$defs",
          "definitions", "properties", "items", "patternProperties", "additionalProperties"})
      rest.as_object().erase(keyword);
    beside.push_back(document_.write(id, std::move(rest)));
  }
  Alternatives out;
  for (const int part : parts) out.push_back({part});
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = i + 1; j < parts.size(); ++j) {
      NodeIds both = beside;
      both.push_back(parts[i]);
      both.push_back(parts[j]);
      if (empty_(both)) continue;
      for (const int other : {parts[i], parts[j]}) {
        const auto possible = negated(other, 0);
        if (!possible.ok()) {
          return document_.unsupported_keyword(
              id, "oneOf",
              fmt::format("parts {} and {} can match the same value ('anyOf' allows that)", i, j));
        }
      }
      out[i].push_back(document_.negation(parts[j]));
      out[j].push_back(document_.negation(parts[i]));
    }
  }
  return out;
}

Status SchemaBranches::conditional(int id, Draft& draft) {
  const json::Value* condition = document_.find(id, "if");
  if (condition == nullptr) return {};
  const json::Value* then = document_.find(id, "then");
  const json::Value* otherwise = document_.find(id, "else");
  if (then == nullptr && otherwise == nullptr) return {};
  const int test = document_.child(id, *condition, "if");
  Alternatives all = {{test}};
  if (then != nullptr) all[0].push_back(document_.child(id, *then, "then"));
  const auto negative = negated(test, 0);
  if (!negative.ok()) return negative.status().with_context("'if'");
  for (NodeIds nodes : *negative) {
    if (otherwise != nullptr) nodes.push_back(document_.child(id, *otherwise, "else"));
    all.push_back(std::move(nodes));
  }
  draft.choices.push_back(std::move(all));
  return {};
}

int SchemaBranches::write(int origin,
                          std::initializer_list<std::pair<std::string_view, json::Value>> members) {
  json::Object o;
  for (const auto& [key, value] : members) o[key] = value;
  return document_.write(origin, json::Value(std::move(o)));
}

namespace {

json::Value only_property(const std::string& name, json::Value schema) {
  json::Object o;
  o[name] = std::move(schema);
  return json::Value(std::move(o));
}

}  // namespace

Status SchemaBranches::dependencies(int id, std::string_view keyword, Draft& draft) {
  const json::Value* all = document_.find(id, keyword);
  if (all == nullptr) return {};
  if (!all->is_object()) return document_.error(id, keyword, "must be an object");
  for (const auto& [name, what] : all->as_object()) {
    const int absent = write(id, {{"properties", only_property(name, false)}});
    NodeIds present;
    if (keyword == "dependentRequired" || (keyword == "dependencies" && what.is_array())) {
      if (!what.is_array()) return document_.error(id, keyword, "must hold arrays of names");
      json::Array names = what.as_array();
      names.insert(names.begin(), json::Value(name));
      present = {write(id, {{"type", "object"}, {"required", std::move(names)}})};
    } else {
      json::Array names = {json::Value(name)};
      present = {write(id, {{"type", "object"}, {"required", std::move(names)}}),
                 document_.child(id, what, std::string(keyword) + "/" + name)};
    }
    draft.choices.push_back({{absent}, std::move(present)});
  }
  return {};
}

// --- negation ---

Result<SchemaBranches::Alternatives> SchemaBranches::negated(int id, int depth) {
  const auto known = negated_.find(id);
  if (known != negated_.end()) return known->second;
  if (depth > 32 || !negating_.insert(id).second)
    return document_.unsupported_keyword(id, "not", "of a recursive or very deep schema");
  auto out = find_negated(id, depth);
  negating_.erase(id);
  if (out.ok()) negated_.emplace(id, *out);
  return out;
}

Result<SchemaBranches::Alternatives> SchemaBranches::find_negated(int id, int depth) {
  FRESHET_RETURN_IF_ERROR(check_keywords(id));
  const json::Value& s = document_.schema(id);
  if (s.is_bool()) return s.as_bool() ? Alternatives{} : Alternatives{{}};
  Alternatives out;
  for (const auto& [keyword, value] : s.as_object()) {
    if (is_annotation(keyword)) continue;
    if (document_.ref_stands_alone() && keyword != "$ref" && s.find("$ref") != nullptr &&
        !document_.node(id).written)
      continue;
    FRESHET_ASSIGN_OR_RETURN(const Alternatives some, negated_keyword(id, keyword, value, depth));
    out.insert(out.end(), some.begin(), some.end());
  }
  if (out.size() > kMaxBranches) return document_.unsupported_keyword(id, "not", "too large");
  return out;
}

Result<SchemaBranches::Alternatives> SchemaBranches::negated_keyword(int id,
                                                                     const std::string& keyword,
                                                                     const json::Value& v,
                                                                     int depth) {
  if (std::ranges::find(kReferences, keyword) != std::end(kReferences)) {
    FRESHET_ASSIGN_OR_RETURN(const int target, document_.resolve(id, keyword));
    return negated(target, depth + 1);
  }
  if (keyword == "not") return Alternatives{{document_.child(id, v, "not")}};
  if (keyword == "type") return negated_type(id, v);
  if (keyword == "const") return Alternatives{{write(id, {{kNotValues, json::Array{v}}})}};
  if (keyword == "enum") return Alternatives{{write(id, {{kNotValues, v}})}};
  if (keyword == "pattern")
    return Alternatives{{write(id, {{"type", "string"}, {kNotPattern, v}})}};
  if (keyword == "multipleOf")
    return Alternatives{{write(id, {{"type", "number"}, {kNotMultiple, v}})}};
  if (keyword == "allOf" || keyword == "anyOf") {
    FRESHET_ASSIGN_OR_RETURN(const NodeIds parts, children(id, keyword));
    Alternatives out;
    NodeIds together;
    for (const int part : parts) {
      FRESHET_RETURN_IF_ERROR(negated(part, depth + 1).status());
      out.push_back({document_.negation(part)});
      together.push_back(out.back().front());
    }
    return keyword == "allOf" ? out : Alternatives{together};
  }
  if (keyword == "required" && v.is_array()) {
    Alternatives out;
    for (const json::Value& name : v.as_array()) {
      if (!name.is_string()) return document_.error(id, "required", "must hold strings");
      out.push_back({write(
          id, {{"type", "object"}, {"properties", only_property(name.as_string(), false)}})});
    }
    return out;
  }
  if (keyword == "properties" && v.is_object()) {
    Alternatives out;
    for (const auto& [name, sub] : v.as_object()) {
      const int child = document_.child(id, sub, "properties/" + name);
      FRESHET_RETURN_IF_ERROR(negated(child, depth + 1).status());
      const json::Value differs =
          only_property(name, SchemaDocument::link(document_.negation(child)));
      out.push_back({write(id, {{"type", "object"},
                                {"required", json::Array{json::Value(name)}},
                                {"properties", differs}})});
    }
    return out;
  }
  return negated_bound(id, keyword, v);
}

Result<SchemaBranches::Alternatives> SchemaBranches::negated_type(int id, const json::Value& v) {
  std::set<std::string> given;
  if (v.is_string()) given.insert(v.as_string());
  if (v.is_array()) {
    for (const json::Value& t : v.as_array()) {
      if (t.is_string()) given.insert(t.as_string());
    }
  }
  json::Array rest;
  for (const char* t : {"object", "array", "string", "number", "boolean", "null"}) {
    if (!given.contains(t) && !(std::string_view(t) == "number" && given.contains("integer")))
      rest.emplace_back(t);
  }
  Alternatives out;
  if (!rest.empty()) out.push_back({write(id, {{"type", std::move(rest)}})});
  if (given.contains("integer") && !given.contains("number"))
    out.push_back({write(id, {{"type", "number"}, {kNotWhole, true}})});
  return out;
}

Result<SchemaBranches::Alternatives> SchemaBranches::negated_bound(int id,
                                                                   const std::string& keyword,
                                                                   const json::Value& v) {
  struct Opposite {
    std::string_view keyword, type, opposite;
    int step;  // 0: the same bound; else the adjacent count
  };
  static constexpr std::array kOpposites = {
      Opposite{"minimum", "number", "exclusiveMaximum", 0},
      Opposite{"maximum", "number", "exclusiveMinimum", 0},
      Opposite{"exclusiveMinimum", "number", "maximum", 0},
      Opposite{"exclusiveMaximum", "number", "minimum", 0},
      Opposite{"minLength", "string", "maxLength", -1},
      Opposite{"maxLength", "string", "minLength", 1},
      Opposite{"minItems", "array", "maxItems", -1},
      Opposite{"maxItems", "array", "minItems", 1},
      Opposite{"minProperties", "object", "maxProperties", -1},
      Opposite{"maxProperties", "object", "minProperties", 1}};
  for (const Opposite& o : kOpposites) {
    if (o.keyword != keyword) continue;
    if (o.step == 0) {
      if (!v.is_number() || document_.find(id, "exclusiveMinimum") != nullptr ||
          document_.find(id, "exclusiveMaximum") != nullptr) {
        if (!v.is_number() || document_.ref_stands_alone())
          return document_.unsupported_keyword(id, keyword, "under 'not', 'if' or 'oneOf'");
      }
      return Alternatives{{write(id, {{"type", std::string(o.type)}, {o.opposite, v}})}};
    }
    const auto n = v.is_number() ? v.as_int64() : std::nullopt;
    if (!n || *n < 0) return document_.error(id, keyword, "must be a natural number");
    if (*n + o.step < 0) return Alternatives{};
    return Alternatives{{write(id, {{"type", std::string(o.type)}, {o.opposite, *n + o.step}})}};
  }
  static const std::set<std::string_view> kConstrains = {"items",
                                                         "prefixItems",
                                                         "additionalItems",
                                                         "contains",
                                                         "uniqueItems",
                                                         "patternProperties",
                                                         "additionalProperties",
                                                         "propertyNames",
                                                         "format",
                                                         "oneOf",
                                                         "if",
                                                         "dependentRequired",
                                                         "dependentSchemas",
                                                         "dependencies",
                                                         "unevaluatedItems",
                                                         "unevaluatedProperties",
                                                         "required",
                                                         "properties"};
  const bool nothing = v.is_bool() && (keyword == "uniqueItems" ? !v.as_bool() : v.as_bool());
  if ((kConstrains.contains(keyword) && !nothing) || keyword.starts_with('\x01'))
    return document_.unsupported_keyword(id, keyword.starts_with('\x01') ? "not" : keyword,
                                         "under 'not', 'if' or 'oneOf'");
  return Alternatives{};
}

}  // namespace freshet::grammar

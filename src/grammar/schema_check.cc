#include "grammar/schema_check.h"

#include <algorithm>

#include "grammar/decimal_range.h"
#include "grammar/schema_text.h"

namespace freshet::grammar {
namespace {

// Numbers without an exponent, in the spelling of number languages.
std::string plain_text(const Decimal& d) {
  return (d.negative ? "-" : "") + d.whole + (d.fraction.empty() ? "" : "." + d.fraction);
}

// Checks one node, following the specification; each function checks one group of keywords.
class NodeCheck {
 public:
  NodeCheck(ValueChecker& checker, int id, const json::Value& value, int depth)
      : checker_(checker), document_(checker.document()), id_(id), value_(value), depth_(depth) {}

  Result<bool> check() {
    if (depth_ > 64) return document_.unsupported_keyword(id_, "enum", "checked too deeply");
    const json::Value& s = document_.schema(id_);
    if (s.is_bool()) return s.as_bool();
    if (document_.ref_stands_alone() && !document_.node(id_).written && s.find("$ref") != nullptr) {
      FRESHET_ASSIGN_OR_RETURN(const int target, document_.resolve(id_, "$ref"));
      return checker_.meets(target, value_, depth_ + 1);
    }
    for (const auto part : {&NodeCheck::logic, &NodeCheck::conditionals, &NodeCheck::own,
                            &NodeCheck::array, &NodeCheck::object}) {
      FRESHET_ASSIGN_OR_RETURN(const bool good, (this->*part)());
      if (!good) return false;
    }
    return true;
  }

 private:
  Result<bool> holds(const json::Value& schema, std::string_view step, const json::Value& value) {
    return checker_.meets(document_.child(id_, schema, step), value, depth_ + 1);
  }

  Result<bool> logic() {
    for (const std::string_view keyword : kReferences) {
      if (document_.find(id_, keyword) == nullptr) continue;
      if (!document_.is_static(id_, keyword))
        return document_.unsupported_keyword(id_, keyword, "several places have its anchor");
      FRESHET_ASSIGN_OR_RETURN(const int target, document_.resolve(id_, keyword));
      FRESHET_ASSIGN_OR_RETURN(const bool good, checker_.meets(target, value_, depth_ + 1));
      if (!good) return false;
    }
    for (const std::string_view keyword : {"allOf", "anyOf", "oneOf"}) {
      const json::Value* parts = document_.find(id_, keyword);
      if (parts == nullptr) continue;
      if (!parts->is_array()) return document_.error(id_, keyword, "must be an array");
      size_t good = 0;
      for (const json::Value& part : parts->as_array()) {
        FRESHET_ASSIGN_OR_RETURN(const bool one, holds(part, keyword, value_));
        good += one ? 1 : 0;
      }
      const bool enough = keyword == "allOf"   ? good == parts->as_array().size()
                          : keyword == "anyOf" ? good > 0
                                               : good == 1;
      if (!enough) return false;
    }
    if (const json::Value* inner = document_.find(id_, "not")) {
      FRESHET_ASSIGN_OR_RETURN(const bool one, holds(*inner, "not", value_));
      if (one) return false;
    }
    return true;
  }

  Result<bool> conditionals() {
    if (const json::Value* test = document_.find(id_, "if")) {
      FRESHET_ASSIGN_OR_RETURN(const bool so, holds(*test, "if", value_));
      const std::string_view step = so ? "then" : "else";
      if (const json::Value* next = document_.find(id_, step)) {
        FRESHET_ASSIGN_OR_RETURN(const bool good, holds(*next, step, value_));
        if (!good) return false;
      }
    }
    if (!value_.is_object()) return true;
    for (const std::string_view keyword :
         {"dependentRequired", "dependentSchemas", "dependencies"}) {
      const json::Value* all = document_.find(id_, keyword);
      if (all == nullptr || !all->is_object()) continue;
      for (const auto& [name, what] : all->as_object()) {
        if (value_.find(name) == nullptr) continue;
        if (what.is_array()) {
          for (const json::Value& other : what.as_array()) {
            if (other.is_string() && value_.find(other.as_string()) == nullptr) return false;
          }
          continue;
        }
        FRESHET_ASSIGN_OR_RETURN(const bool good, holds(what, keyword, value_));
        if (!good) return false;
      }
    }
    return true;
  }

  // type, enum, const, and the keywords for strings and numbers.
  Result<bool> own() {
    bool whole = false;
    const NodeIds self = {id_};
    FRESHET_ASSIGN_OR_RETURN(const unsigned types, allowed_types(document_, self, whole));
    if ((types & type_bit(value_)) == 0) return false;
    const json::Value* c = document_.find(id_, "const");
    if (c != nullptr && !(*c == value_)) return false;
    if (const json::Value* e = document_.find(id_, "enum")) {
      if (!e->is_array()) return document_.error(id_, "enum", "must be an array");
      if (!checker_.lists(*e, value_)) return false;
    }
    const json::Value* forbidden = document_.find(id_, kNotValues);
    if (forbidden != nullptr && document_.node(id_).written && checker_.lists(*forbidden, value_))
      return false;
    if (value_.is_string()) {
      const auto& language = checker_.strings(id_);
      if (!language.ok()) return language.status();
      return !*language || (*language)->contains(value_.as_string());
    }
    if (!value_.is_number()) return true;
    const auto& language = checker_.numbers(id_, whole);
    if (!language.ok()) return language.status();
    const auto d = parse_decimal(value_.number_text());
    if (!d) return document_.unsupported_keyword(id_, "enum", "a number of more than 400 digits");
    return !*language || (*language)->contains(plain_text(*d));
  }

  Result<bool> array() {
    if (!value_.is_array()) return true;
    for (const char* keyword : {"uniqueItems", "contains", "unevaluatedItems"}) {
      if (document_.find(id_, keyword) != nullptr)
        return document_.unsupported_keyword(id_, keyword);
    }
    FRESHET_ASSIGN_OR_RETURN(const CountRange count,
                             count_range(document_, {id_}, "minItems", "maxItems"));
    const int64_t size = static_cast<int64_t>(value_.as_array().size());
    if (size < count.low || (count.high >= 0 && size > count.high)) return false;
    const json::Value* items = document_.find(id_, "items");
    const json::Value* heads = document_.find(id_, "prefixItems");
    if (items != nullptr && items->is_array()) {
      heads = items;
      items = document_.find(id_, "additionalItems");
    }
    for (size_t i = 0; i < value_.as_array().size(); ++i) {
      const bool head = heads != nullptr && heads->is_array() && i < heads->as_array().size();
      const json::Value* schema = head ? &heads->as_array()[i] : items;
      if (schema == nullptr) continue;
      FRESHET_ASSIGN_OR_RETURN(const bool good, holds(*schema, "items", value_.as_array()[i]));
      if (!good) return false;
    }
    return true;
  }

  Result<bool> object() {
    if (!value_.is_object()) return true;
    if (document_.find(id_, "unevaluatedProperties") != nullptr)
      return document_.unsupported_keyword(id_, "unevaluatedProperties");
    FRESHET_ASSIGN_OR_RETURN(const CountRange count,
                             count_range(document_, {id_}, "minProperties", "maxProperties"));
    const int64_t size = static_cast<int64_t>(value_.as_object().size());
    if (size < count.low || (count.high >= 0 && size > count.high)) return false;
    if (const json::Value* required = document_.find(id_, "required");
        required != nullptr && required->is_array()) {
      for (const json::Value& name : required->as_array()) {
        if (name.is_string() && value_.find(name.as_string()) == nullptr) return false;
      }
    }
    for (const auto& [name, member] : value_.as_object()) {
      FRESHET_ASSIGN_OR_RETURN(const bool good, property(name, member));
      if (!good) return false;
    }
    return true;
  }

  Result<bool> property(const std::string& name, const json::Value& member) {
    if (const json::Value* names = document_.find(id_, "propertyNames")) {
      FRESHET_ASSIGN_OR_RETURN(const bool good, holds(*names, "propertyNames", json::Value(name)));
      if (!good) return false;
    }
    bool described = false;
    const json::Value* properties = document_.find(id_, "properties");
    if (const json::Value* own = properties != nullptr ? properties->find(name) : nullptr) {
      described = true;
      FRESHET_ASSIGN_OR_RETURN(const bool good, holds(*own, "properties/" + name, member));
      if (!good) return false;
    }
    const json::Value* patterns = document_.find(id_, "patternProperties");
    if (patterns != nullptr && patterns->is_object()) {
      for (const auto& [pattern, schema] : patterns->as_object()) {
        FRESHET_ASSIGN_OR_RETURN(const Language* keys, checker_.key_pattern(id_, pattern));
        if (!keys->contains(name)) continue;
        described = true;
        FRESHET_ASSIGN_OR_RETURN(const bool good, holds(schema, "patternProperties", member));
        if (!good) return false;
      }
    }
    const json::Value* additional = document_.find(id_, "additionalProperties");
    if (described || additional == nullptr) return true;
    return holds(*additional, "additionalProperties", member);
  }

  ValueChecker& checker_;
  SchemaDocument& document_;
  const int id_;
  const json::Value& value_;
  const int depth_;
};

}  // namespace

unsigned type_bit(const json::Value& value) {
  switch (value.type()) {
    case json::Type::kNull:
      return kNullType;
    case json::Type::kBool:
      return kBooleanType;
    case json::Type::kNumber:
      return kNumberType;
    case json::Type::kString:
      return kStringType;
    case json::Type::kArray:
      return kArrayType;
    case json::Type::kObject:
      return kObjectType;
  }
  return 0;
}

Result<unsigned> allowed_types(const SchemaDocument& document, const NodeIds& nodes, bool& whole) {
  unsigned allowed = kAnyType;
  for (const int id : nodes) {
    const json::Value* type = document.find(id, "type");
    if (type == nullptr) continue;
    if (!type->is_string() && !type->is_array())
      return document.error(id, "type", "must be a string or an array of strings");
    const json::Array names = type->is_array() ? type->as_array() : json::Array{*type};
    unsigned here = 0;
    bool any_number = false;
    for (const json::Value& name : names) {
      const std::string t = name.is_string() ? name.as_string() : "";
      any_number = any_number || t == "number";
      const unsigned bit = t == "null"                       ? unsigned{kNullType}
                           : t == "boolean"                  ? unsigned{kBooleanType}
                           : t == "number" || t == "integer" ? unsigned{kNumberType}
                           : t == "string"                   ? unsigned{kStringType}
                           : t == "array"                    ? unsigned{kArrayType}
                           : t == "object"                   ? unsigned{kObjectType}
                                                             : 0U;
      if (bit == 0) return document.error(id, "type", "has an unknown type '" + t + "'");
      here |= bit;
    }
    if ((here & kNumberType) != 0 && !any_number) whole = true;
    allowed &= here;
  }
  return allowed;
}

std::string canonical_text(const json::Value& value) {
  if (value.is_number()) {
    const auto d = parse_decimal(value.number_text());
    return d ? plain_text(*d) : value.number_text();
  }
  std::string out(1, value.is_array() ? '[' : '{');
  if (value.is_array()) {
    for (const json::Value& e : value.as_array()) out.append(canonical_text(e)).push_back(',');
    out.push_back(']');
    return out;
  }
  if (value.is_object()) {
    std::vector<std::string> members;
    for (const auto& [key, member] : value.as_object()) {
      members.emplace_back();
      json::append_quoted(members.back(), key);
      members.back().append(1, ':').append(canonical_text(member));
    }
    std::sort(members.begin(), members.end());  // their order has no meaning
    for (const std::string& m : members) out.append(m).push_back(',');
    out.push_back('}');
    return out;
  }
  return json::write(value);
}

bool ValueChecker::lists(const json::Value& array, const json::Value& value) {
  const auto [it, fresh] = lists_.try_emplace(&array);
  if (fresh && array.is_array()) {
    for (const json::Value& e : array.as_array()) it->second.insert(canonical_text(e));
  }
  return it->second.contains(canonical_text(value));
}

const Result<std::optional<Language>>& ValueChecker::strings(int id) {
  const auto it = strings_.find(id);
  if (it != strings_.end()) return it->second;
  return strings_.emplace(id, string_language(document_, {id})).first->second;
}

const Result<std::optional<Language>>& ValueChecker::numbers(int id, bool whole) {
  const std::pair key(id, whole);
  const auto it = numbers_.find(key);
  if (it != numbers_.end()) return it->second;
  const auto found = [&]() -> Result<std::optional<Language>> {
    FRESHET_ASSIGN_OR_RETURN(auto language, number_language(document_, {id}, whole));
    if (language || !whole) return language;
    FRESHET_ASSIGN_OR_RETURN(Language all, whole_decimals());
    return std::optional<Language>(std::move(all));
  };
  return numbers_.emplace(key, found()).first->second;
}

Result<const Language*> ValueChecker::key_pattern(int id, const std::string& pattern) {
  const auto known = patterns_.find(pattern);
  if (known != patterns_.end()) return &known->second;
  FRESHET_ASSIGN_OR_RETURN(Language keys,
                           pattern_language(document_, id, "patternProperties", pattern));
  return &patterns_.emplace(pattern, std::move(keys)).first->second;
}

Result<bool> ValueChecker::meets(int id, const json::Value& value, int depth) {
  return NodeCheck(*this, id, value, depth).check();
}

}  // namespace freshet::grammar

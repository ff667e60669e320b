#include "server/structured_request.h"

#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

class StructuredReader {
 public:
  explicit StructuredReader(Fields& fields) : fields_(fields) {}

  StructuredRequest read() {
    response_format();
    structured_outputs();
    static constexpr std::pair<const char*, const char*> kGuided[] = {
        {"guided_json", "json"},
        {"guided_regex", "regex"},
        {"guided_choice", "choice"},
        {"guided_grammar", "grammar"},
        {"guided_json_object", "json_object"}};
    for (const auto& [field, kind] : kGuided) {
      if (const json::Value* v = given(field)) add(field, kind, *v);
    }
    if (const json::Value* v = given("json_schema")) add("json_schema", "json", *v);
    if (const json::Value* v = given("grammar"); v != nullptr && *v != json::Value(""))
      add("grammar", "grammar", *v);
    return std::move(found_);
  }

 private:
  const json::Value* given(const char* field) const {
    const json::Value* v = fields_.get(field);
    return v != nullptr && !(v->is_bool() && !v->as_bool()) ? v : nullptr;
  }

  void add(const char* field, const std::string& kind, const json::Value& value) {
    if (!found_.description.is_null()) {
      return fields_.fail(field, fmt::format("'{}' and '{}' cannot be combined: send one of them",
                                             found_.field, field));
    }
    json::Object o;
    o[kind] = value;
    found_ = {json::Value(std::move(o)), field};
  }

  void response_format() {
    const char* const name = "response_format";
    const json::Value* format = fields_.get(name);
    if (format == nullptr) return;
    const std::string type = format->is_object() ? format->get_string("type", "") : "";
    const json::Value* inner = format->find("json_schema");
    const json::Value* schema = inner != nullptr ? inner->find("schema") : nullptr;
    if (schema == nullptr) schema = format->find("schema");  // where llama-server has it
    const bool has_schema = schema != nullptr && !schema->is_null();
    if (type == "json_object" && !has_schema) return add(name, "json_object", json::Value(true));
    if (type == "json_schema" && !has_schema)
      return fields_.fail(name, "'response_format.json_schema.schema' is missing");
    if (type == "json_object" || type == "json_schema") return add(name, "json", *schema);
    if (type != "text")
      fields_.fail(name, "'response_format.type' must be text, json_object or json_schema");
  }

  void structured_outputs() {
    const char* const name = "structured_outputs";
    const json::Value* structured = fields_.get(name);
    if (structured == nullptr) return;
    if (!structured->is_object())
      return fields_.fail(name, "'structured_outputs' must be an object");
    int kinds = 0;
    for (const std::string kind : {"json", "regex", "choice", "grammar", "json_object"}) {
      const json::Value* v = structured->find(kind);
      if (v == nullptr || v->is_null() || (v->is_bool() && !v->as_bool())) continue;
      if (++kinds == 1) add(name, kind, *v);
    }
    if (kinds != 1) {
      return fields_.fail(name,
                          "give exactly one of json, regex, choice, grammar and json_object, and "
                          "no response_format");
    }
    for (const char* option : {"whitespace_pattern", "structural_tag", "disable_any_whitespace",
                               "disable_additional_properties"}) {
      const json::Value* v = structured->find(option);
      if (v == nullptr || v->is_null() || (v->is_bool() && !v->as_bool())) continue;
      fields_.fail(name, fmt::format("'structured_outputs.{}' is not supported", option));
    }
  }

  Fields& fields_;
  StructuredRequest found_;
};

}  // namespace

StructuredRequest read_structured(Fields& fields) {
  return StructuredReader(fields).read();
}

}  // namespace freshet::server

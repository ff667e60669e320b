// Schemas of tool parameters inside a call grammar: each schema means the same as on its own.
#include <gtest/gtest.h>

#include "grammar/grammar.h"

namespace freshet::grammar {
namespace {

std::shared_ptr<const TokenTrie> bytes_only() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  return std::make_shared<TokenTrie>(tokens);
}

json::Value tool(const char* name, const json::Value* parameters) {
  json::Object o;
  o["name"] = name;
  if (parameters != nullptr) o["parameters"] = *parameters;
  return json::Value(std::move(o));
}

Result<std::shared_ptr<const Grammar>> calls_of(json::Array tools) {
  json::Object description;
  description["calls"] = std::move(tools);
  return Grammar::from_description(bytes_only(), json::Value(std::move(description)));
}

bool matches(const std::shared_ptr<const Grammar>& g, const std::string& text) {
  GrammarMatcher m(g);
  return m.accept_bytes(text) && m.can_end();
}

std::string call(const char* name, const std::string& arguments) {
  return std::string(R"({"name":")") + name + R"(","arguments":)" + arguments + "}";
}

struct Case {
  const char* schema;
  std::vector<const char*> yes, no;
};

// References of every form, recursion, anchors, identifiers and dialects.
const std::vector<Case>& reference_cases() {
  static const std::vector<Case> kCases = {
      {R"({"$defs":{"X":{"enum":["a","b"]}},"type":"object","properties":{"x":{"$ref":"#/$defs/X"}},
          "required":["x"],"additionalProperties":false})",
       {R"({"x":"a"})"},
       {"{}", R"({"x":"c"})"}},
      {R"({"definitions":{"X":{"type":"integer"}},"properties":{"x":{"$ref":"#/definitions/X"}},
          "additionalProperties":false})",
       {R"({"x":3})", "{}"},
       {R"({"x":"3"})"}},
      {R"({"properties":{"next":{"anyOf":[{"$ref":"#"},{"type":"null"}]}},"required":["next"],
          "type":"object","additionalProperties":false})",
       {R"({"next":null})", R"({"next":{"next":null}})"},
       {"{}", R"({"next":{"name":"t","arguments":{}}})", R"({"next":{}})"}},
      {R"({"properties":{"a":{"type":"boolean"},"b":{"$ref":"#/properties/a"}},
          "additionalProperties":false})",
       {R"({"a":true,"b":false})"},
       {R"({"b":1})"}},
      {R"({"$defs":{"a~b":{"const":1},"a/b":{"const":2},"a%b":{"const":3},"a b":{"const":4}},
          "properties":{"w":{"$ref":"#/$defs/a~0b"},"x":{"$ref":"#/$defs/a~1b"},
          "y":{"$ref":"#/$defs/a%25b"},"z":{"$ref":"#/$defs/a%20b"}},"additionalProperties":false})",
       {R"({"w":1,"x":2,"y":3,"z":4})"},
       {R"({"w":2})", R"({"x":1})", R"({"y":4})"}},
      {R"({"$id":"http://example.com/a/b.json","properties":{"p":{"$ref":"../c.json"},
          "q":{"$ref":"./d.json#/$defs/e"},"r":{"$ref":"/c.json"},"s":{"$ref":"b.json#f"}},
          "additionalProperties":false,"$defs":{"c":{"$id":"/c.json","const":1},
          "d":{"$id":"d.json","$defs":{"e":{"const":2}}},"f":{"$anchor":"f","const":3}}})",
       {R"({"p":1,"q":2,"r":1,"s":3})"},
       {R"({"p":2})", R"({"q":1})", R"({"s":1})"}},
      {R"({"$defs":{"n":{"$dynamicAnchor":"n","properties":{"c":{"$dynamicRef":"#n"}},
          "type":"object","additionalProperties":false}},"$ref":"#/$defs/n"})",
       {"{}", R"({"c":{"c":{}}})"},
       {R"({"c":1})", R"({"d":1})"}},
      {R"({"$schema":"https://json-schema.org/draft/2019-09/schema","type":"object",
          "properties":{"c":{"$recursiveRef":"#"}},"additionalProperties":false})",
       {"{}", R"({"c":{"c":{}}})"},
       {R"({"c":{"d":1}})"}},
      // Siblings of a reference apply since 2019-09; before, they are ignored.
      {R"({"$defs":{"s":{"type":"string"}},"properties":{"x":{"$ref":"#/$defs/s","maxLength":1}},
          "additionalProperties":false})",
       {R"({"x":"a"})"},
       {R"({"x":"ab"})"}},
      {R"({"$schema":"http://json-schema.org/draft-07/schema#","definitions":{"s":{"type":"string"}},
          "properties":{"x":{"$ref":"#/definitions/s","maxLength":1}},"additionalProperties":false})",
       {R"({"x":"ab"})"},
       {R"({"x":1})"}},
      {R"({"$schema":"http://json-schema.org/draft-04/schema#","id":"http://e.org/r",
          "properties":{"n":{"$ref":"r#/definitions/i"}},"definitions":{"i":{"type":"integer"}},
          "additionalProperties":false})",
       {R"({"n":1})"},
       {R"({"n":1.0})"}}};
  return kCases;
}

TEST(Calls, ASchemaMeansWhatItMeansAlone) {
  // A neighbouring schema has definitions of the same names with other meanings.
  const json::Value other =
      *json::parse(R"({"$defs":{"X":{"const":"z"},"n":{"const":0},"s":{"const":0}},
    "definitions":{"X":{"const":"z"},"s":{"const":0}},"properties":{"x":{"$ref":"#/$defs/X"}},
    "required":["x"],"additionalProperties":false})");
  for (const Case& c : reference_cases()) {
    const json::Value schema = *json::parse(c.schema);
    const auto alone = Grammar::from_json_schema(bytes_only(), schema);
    ASSERT_TRUE(alone.ok()) << alone.status().message();
    const auto g = calls_of({tool("other", &other), tool("t", &schema), tool("last", &other)});
    ASSERT_TRUE(g.ok()) << g.status().message();
    for (const bool good : {true, false}) {
      for (const char* arguments : good ? c.yes : c.no) {
        EXPECT_EQ(matches(*alone, arguments), good) << c.schema << arguments;
        EXPECT_EQ(matches(*g, call("t", arguments)), good) << c.schema << arguments;
      }
    }
    EXPECT_TRUE(matches(*g, call("last", R"({"x":"z"})")));
    EXPECT_FALSE(matches(*g, call("other", R"({"x":"a"})")));
  }
}

// Everything that the suite's schemas say about objects applies to arguments.
TEST(Calls, TakeWhatResponseFormatTakes) {
  auto suite = json::parse_file(FRESHET_UNPACKED_DATA "/grammar/json_schema_suite.json");
  ASSERT_TRUE(suite.ok()) << suite.status().message();
  int checked = 0;
  for (const auto& [file, groups] : suite->as_object()) {
    for (const json::Value& group : groups.as_array()) {
      const json::Value& schema = *group.find("schema");
      const auto alone = Grammar::from_json_schema(bytes_only(), schema);
      const auto g = calls_of({tool("t", &schema), tool("u", &schema)});
      if (!alone.ok() && alone.status().code() == StatusCode::kUnsupported) {
        // Unless the unsupported keyword does not apply to objects.
        const std::string& message = g.status().message();
        EXPECT_TRUE(g.ok() || message.ends_with(alone.status().message()) ||
                    message.ends_with("no text at all"))
            << message;
        continue;
      }
      for (const json::Value& test : group.find("tests")->as_array()) {
        const std::string data = json::write(*test.find("data"));
        const bool expected = alone.ok() && matches(*alone, data) && test.find("data")->is_object();
        EXPECT_EQ(g.ok() && matches(*g, call("u", data)), expected) << file << ": " << data;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 1500);
}

TEST(Calls, AToolWithoutParametersTakesNone) {
  const json::Value null;
  const json::Value any = *json::parse("{}");
  const auto g = calls_of({tool("absent", nullptr), tool("null", &null), tool("any", &any)});
  ASSERT_TRUE(g.ok()) << g.status().message();
  for (const char* name : {"absent", "null"}) {
    EXPECT_TRUE(matches(*g, call(name, "{}"))) << name;
    EXPECT_FALSE(matches(*g, call(name, R"({"junk":1})"))) << name;
    EXPECT_FALSE(matches(*g, call(name, "null"))) << name;
  }
  EXPECT_TRUE(matches(*g, call("any", R"({"junk":1})")));
  EXPECT_FALSE(matches(*g, call("any", "1"))) << "arguments are an object";
}

TEST(Calls, RefusalsNameTheToolAndThePlace) {
  const json::Value schema =
      *json::parse(R"({"properties":{"x":{"$ref":"#/$defs/gone"},"y":{"uniqueItems":true}}})");
  const auto g = calls_of({tool("first", nullptr), tool("second", &schema)});
  ASSERT_FALSE(g.ok());
  for (const char* part : {"tool 'second'", "'$ref' at #/properties/x", "#/$defs/gone"})
    EXPECT_NE(g.status().message().find(part), std::string::npos) << g.status().message();
}

}  // namespace
}  // namespace freshet::grammar

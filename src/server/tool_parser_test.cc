#include "server/tool_parser.h"

#include <gtest/gtest.h>

#include "base/test_clock.h"

namespace freshet::server {
namespace {

struct Outcome {
  std::string content;
  std::vector<ToolCall> calls;
};

Outcome parse(ToolDialect dialect, std::string_view text, size_t piece) {
  ToolParser parser(dialect, "seed");
  Outcome out;
  const auto take = [&](ToolParser::Step s) {
    out.content += s.content;
    for (auto& c : s.calls) out.calls.push_back(std::move(c));
  };
  for (size_t at = 0; at < text.size(); at += piece) take(parser.feed(text.substr(at, piece)));
  take(parser.finish());
  return out;
}

struct Case {
  ToolDialect dialect;
  const char* text;
  const char* content;
  std::vector<std::pair<std::string, std::string>> calls;
};

class ToolDialects : public testing::TestWithParam<Case> {};

TEST_P(ToolDialects, GiveTheSameCallsHoweverTheTextIsCut) {
  const Case& c = GetParam();
  for (size_t piece : {size_t{1}, size_t{2}, size_t{3}, size_t{7}, size_t{1000}}) {
    const Outcome out = parse(c.dialect, c.text, piece);
    EXPECT_EQ(out.content, c.content) << "pieces of " << piece;
    ASSERT_EQ(out.calls.size(), c.calls.size()) << "pieces of " << piece;
    for (size_t i = 0; i < c.calls.size(); ++i) {
      EXPECT_EQ(out.calls[i].name, c.calls[i].first);
      EXPECT_EQ(out.calls[i].arguments, c.calls[i].second);
    }
  }
}

TEST(ToolParser, LooksAtEachByteOnce) {
  const auto seconds_for = [](size_t bytes) {
    ToolParser parser(ToolDialect::kHermes, "seed");
    const double begin = cpu_seconds();
    parser.feed("<tool_call>{\"name\": \"f\", \"arguments\": {\"t\": \"");
    for (size_t i = 0; i < bytes; ++i) parser.feed("x");
    EXPECT_EQ(parser.feed("\"}}</tool_call>").calls.size(), 1U);
    return cpu_seconds() - begin;
  };
  seconds_for(20'000);
  EXPECT_LT(seconds_for(400'000), 9 * seconds_for(100'000) + 0.01);
}

INSTANTIATE_TEST_SUITE_P(
    All, ToolDialects,
    testing::Values(
        Case{ToolDialect::kHermes, "Hello <b>", "Hello <b>", {}},
        Case{ToolDialect::kHermes,
             "A<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1.50}}\n</tool_call>",
             "A",
             {{"f", "{\"x\":1.50}"}}},
        Case{ToolDialect::kHermes,
             "<tool_call>{\"name\":\"f\",\"arguments\":{}}</"
             "tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{\"s\":\"</x>\"}}</tool_call>",
             "",
             {{"f", "{}"}, {"g", "{\"s\":\"</x>\"}"}}},
        Case{ToolDialect::kHermes,
             "<tool_call>{\"name\":\"f\",\"arguments\":{}}",
             "",
             {{"f", "{}"}}},
        Case{ToolDialect::kHermes,
             "<tool_call>nonsense</tool_call> x",
             "<tool_call>nonsense</tool_call> x",
             {}},
        Case{ToolDialect::kHermes, "<tool_call>{\"name\":", "<tool_call>{\"name\":", {}},
        // Markup in strings is text.
        Case{ToolDialect::kHermes,
             "<tool_call>{\"name\": \"w\", \"arguments\": {\"t\": \"a </tool_call> "
             "b\"}}</tool_call>",
             "",
             {{"w", "{\"t\":\"a </tool_call> b\"}"}}},
        Case{ToolDialect::kHermes,
             "x<tool_call>\n{\"name\":\"w\",\"arguments\":{\"t\":\"\\\"</"
             "tool_call><tool_call>}\\\\\"}}"
             "\n</tool_call><tool_call>{\"name\":\"v\",\"arguments\":{}}</tool_call>",
             "x",
             {{"w", "{\"t\":\"\\\"</tool_call><tool_call>}\\\\\"}"}, {"v", "{}"}}},
        Case{ToolDialect::kHermes,
             "<tool_call>[{\"name\":\"w\",\"arguments\":{\"t\":\"</think></tool_call>\"}}]</"
             "tool_call>",
             "",
             {{"w", "{\"t\":\"</think></tool_call>\"}"}}},
        Case{ToolDialect::kHermes,  // stopped before the closing tag
             "<tool_call>{\"name\":\"w\",\"arguments\":{\"t\":\"</tool_call>\"}}",
             "",
             {{"w", "{\"t\":\"</tool_call>\"}"}}},
        Case{ToolDialect::kHermes,  // an unterminated string hides no later call
             "<tool_call>{\"name\": \"w}</tool_call> and "
             "<tool_call>{\"name\":\"v\",\"arguments\":{\"t\":\"</tool_call>\"}}</tool_call>",
             "<tool_call>{\"name\": \"w}</tool_call> and ",
             {{"v", "{\"t\":\"</tool_call>\"}"}}},
        Case{ToolDialect::kLlama3,
             "{\"name\": \"f\", \"parameters\": {\"a\": \"<|python_tag|>{;}\\\"\"}}; "
             "{\"name\": \"g\", \"parameters\": {}}",
             "",
             {{"f", "{\"a\":\"<|python_tag|>{;}\\\"\"}"}, {"g", "{}"}}},
        Case{ToolDialect::kMistral,
             "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": \"]}[TOOL_CALLS][ARGS]\"}}]",
             "",
             {{"f", "{\"x\":\"]}[TOOL_CALLS][ARGS]\"}"}}},
        Case{ToolDialect::kMistral,
             "[TOOL_CALLS]f[ARGS]{\"x\": \"[TOOL_CALLS]g[ARGS]{}\"}",
             "",
             {{"f", "{\"x\": \"[TOOL_CALLS]g[ARGS]{}\"}"}}},
        Case{ToolDialect::kLlama3,
             "{\"name\": \"f\", \"parameters\": {\"a\": [1, 2]}}",
             "",
             {{"f", "{\"a\":[1,2]}"}}},
        Case{ToolDialect::kLlama3,
             "<|python_tag|>{\"name\":\"f\",\"parameters\":{}}; {\"name\":\"g\",\"parameters\":{}}",
             "",
             {{"f", "{}"}, {"g", "{}"}}},
        Case{
            ToolDialect::kLlama3, "The answer is {\"name\": 1}", "The answer is {\"name\": 1}", {}},
        Case{ToolDialect::kLlama3, "{\"colour\": \"red\"}", "{\"colour\": \"red\"}", {}},
        Case{ToolDialect::kMistral,
             "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
             "",
             {{"f", "{\"x\":1}"}}},
        Case{ToolDialect::kMistral,
             "ok[TOOL_CALLS]f[ARGS]{\"x\": 1}[TOOL_CALLS]g{\"y\": \"}\"}",
             "ok",
             {{"f", "{\"x\": 1}"}, {"g", "{\"y\": \"}\"}"}}},
        Case{ToolDialect::kMistral, "[TOOL_CALLS] broken", "[TOOL_CALLS] broken", {}},
        Case{ToolDialect::kMistral, "[TOOL", "[TOOL", {}}));

TEST(ToolParser, MakesIdsThatMistralAccepts) {
  const Outcome out =
      parse(ToolDialect::kMistral, "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}]", 5);
  ASSERT_EQ(out.calls.size(), 1U);
  EXPECT_EQ(out.calls[0].id.size(), 9U);
}

TEST(ToolParser, KnowsTheDialectOfATemplate) {
  EXPECT_EQ(tool_dialect_of_template("... <tool_call> ..."), ToolDialect::kHermes);
  EXPECT_EQ(tool_dialect_of_template("{{ '[TOOL_CALLS]' }}"), ToolDialect::kMistral);
  EXPECT_EQ(tool_dialect_of_template("'<|python_tag|>'"), ToolDialect::kLlama3);
}

}  // namespace
}  // namespace freshet::server

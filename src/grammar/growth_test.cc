// Work grows linearly: four times the input takes about four times as long, never sixteen times.
#include <algorithm>
#include <functional>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/test_clock.h"
#include "grammar/grammar.h"

namespace freshet::grammar {
namespace {

using Compiled = Result<std::shared_ptr<const Grammar>>;

std::shared_ptr<const TokenTrie> bytes_only() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  return std::make_shared<TokenTrie>(tokens);
}

std::string joined(int n, const char* separator, const std::function<std::string(int)>& part) {
  std::string out;
  for (int i = 0; i < n; ++i) {
    if (i > 0) out += separator;
    out += part(i);
  }
  return out;
}
// Template with {0} for the number of the part.
std::string numbered(int n, const char* separator, const char* part) {
  return joined(n, separator, [&](int i) { return fmt::format(fmt::runtime(part), i); });
}

Compiled schema(const std::string& text) {
  return Grammar::from_json_schema(bytes_only(), *json::parse(text));
}
Compiled gbnf(const std::string& text) {
  return Grammar::from_ebnf(bytes_only(), text);
}

struct Case {
  const char* name;
  int size;
  std::function<Compiled(int)> make;
};

std::vector<Case> schema_cases() {
  return {
      {"enum", 2000,
       [](int n) { return schema(R"({"enum":[)" + numbered(n, ",", R"("v{0}")") + "]}"); }},
      {"enum beside a pattern", 1000,
       [](int n) {
         return schema(R"({"pattern":"^v","maxLength":5000,"enum":[)" +
                       numbered(n, ",", R"("v{0}")") + "]}");
       }},
      {"enum of integers", 1000,
       [](int n) {
         return schema(R"({"type":"integer","minimum":5,"enum":[)" + numbered(n, ",", "{0}") +
                       "]}");
       }},
      {"enum in two nodes", 1000,
       [](int n) {
         const std::string list = R"({"enum":[)" + numbered(n, ",", R"("v{0}")") + "]}";
         return schema(R"({"allOf":[)" + list + "," + list + "]}");
       }},
      {"not one of many numbers", 500,
       [](int n) {
         return schema(R"({"type":"number","not":{"enum":[)" + numbered(n, ",", "{0}") + "]}}");
       }},
      {"prefixItems", 400,
       [](int n) {
         return schema(R"({"type":"array","prefixItems":[)" +
                       numbered(n, ",", R"({{"const":{0}}})") + "]}");
       }},
      {"required names", 400,
       [](int n) {
         return schema(R"({"type":"object","required":[)" + numbered(n, ",", R"("p{0}")") + "]}");
       }},
      {"alternatives in a pattern", 200,
       [](int n) { return schema(R"({"pattern":"^()" + numbered(n, "|", "word{0}") + R"()$"})"); }},
  };
}

std::vector<Case> grammar_cases() {
  return {
      {"a chain of rules, the last first", 1000,
       [](int n) {
         return gbnf("a0 ::= \"x\"\n" +
                     joined(n, "\n", [](int i) { return fmt::format("a{} ::= a{}", i + 1, i); }) +
                     fmt::format("\nroot ::= a{}", n));
       }},
      {"rules that may all be empty", 500,
       [](int n) {
         return gbnf(
             "a0 ::= \"x\"?\n" +
             joined(n, "\n", [](int i) { return fmt::format("a{} ::= a{} \"y\"?", i + 1, i); }) +
             fmt::format("\nroot ::= a{}", n));
       }},
      {"alternatives again and again", 1000,
       [](int n) {
         return Grammar::from_regex(bytes_only(), "(" + numbered(n, "|", "lit{0}") + ")*");
       }},
      {"literals", 1000,
       [](int n) { return gbnf("root ::= " + numbered(n, " | ", "\"lit {0}\"")); }},
      {"choices", 1000,
       [](int n) {
         std::vector<std::string> choices;
         for (int i = 0; i < n; ++i) choices.push_back(fmt::format("choice {}", i));
         return Grammar::from_choices(bytes_only(), choices);
       }},
  };
}

class Growth : public testing::TestWithParam<Case> {};

double seconds_for(const Case& c, int size) {
  double best = 1e9;
  for (int run = 0; run < 3; ++run) {
    const double begin = cpu_seconds();
    const Compiled g = c.make(size);
    best = std::min(best, cpu_seconds() - begin);
    EXPECT_TRUE(g.ok()) << c.name << ": " << g.status().message();
  }
  return best;
}

TEST_P(Growth, IsThatOfTheInput) {
  const Case& c = GetParam();
  const double small = seconds_for(c, c.size);
  const double large = seconds_for(c, 4 * c.size);
  EXPECT_LT(large, 9 * small + 0.002) << c.name << ": " << small << " s, then " << large << " s";
}

INSTANTIATE_TEST_SUITE_P(Schemas, Growth, testing::ValuesIn(schema_cases()));
INSTANTIATE_TEST_SUITE_P(Grammars, Growth, testing::ValuesIn(grammar_cases()));

// Here explicit stacks would double with each byte; the number of configurations must not.
TEST(Ambiguity, DoesNotMultiplyWithTheText) {
  const auto g = gbnf(R"(root ::= "a" (root "b" | root "c") | "z")");
  ASSERT_TRUE(g.ok()) << g.status().message();
  GrammarMatcher m(*g);
  const double begin = cpu_seconds();
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(m.accept('a'));
  ASSERT_TRUE(m.accept('z'));
  EXPECT_FALSE(m.can_end());
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(m.accept(i % 3 == 0 ? 'b' : 'c'));
  EXPECT_TRUE(m.can_end());
  EXPECT_FALSE(m.accept('b'));
  m.rollback(1);
  EXPECT_FALSE(m.can_end());
  EXPECT_TRUE(m.accept('b'));
  EXPECT_LT(cpu_seconds() - begin, kSlowBuild ? 10.0 : 1.0);
}

// A call that returns before all of its callers are known must return to all of them.
TEST(Ambiguity, EmptyRulesReturnToAllOfTheirCallers) {
  const auto g = gbnf("root ::= c \"!\"\na ::= \"x\"?\nb ::= a a\nc ::= b b");
  ASSERT_TRUE(g.ok()) << g.status().message();
  for (int n = 0; n <= 5; ++n) {
    GrammarMatcher m(*g);
    EXPECT_EQ(m.accept_bytes(std::string(static_cast<size_t>(n), 'x') + "!"), n <= 4) << n;
  }
  std::string deep = "a0 ::= \"x\"?\n";
  for (int i = 0; i < 40; ++i) deep += fmt::format("a{} ::= a{} a{} \"\"\n", i + 1, i, i);
  const auto h = gbnf(deep + "root ::= a40 \"!\"");
  ASSERT_TRUE(h.ok());
  GrammarMatcher m(*h);
  EXPECT_TRUE(m.accept_bytes("xxxxxxxxxxxxxxxxxxxx!"));
  EXPECT_TRUE(m.can_end());
}

TEST(DeepSchemas, DoNotNestOnTheStack) {
  const auto g = schema(R"({"type":"array","prefixItems":[)" + numbered(20000, ",", "{{}}") + "]}");
  ASSERT_TRUE(g.ok()) << g.status().message();
  GrammarMatcher m(*g);
  EXPECT_TRUE(m.accept_bytes("[1,2,[3]]"));
  EXPECT_TRUE(m.can_end());
}

}  // namespace
}  // namespace freshet::grammar

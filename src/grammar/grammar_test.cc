#include "grammar/grammar.h"

#include <algorithm>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "base/test_clock.h"

namespace freshet::grammar {
namespace {

// Every byte, and random short strings over the characters of JSON.
std::shared_ptr<const TokenTrie> make_trie(unsigned seed = 1, int extra = 3000) {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, static_cast<char>(b));
  tokens.emplace_back();  // a special token
  std::mt19937 random(seed);
  const std::string alphabet = "{}[]\",: \n0123456789abcdefgtrue-.\\";
  for (int i = 0; i < extra; ++i) {
    std::string t;
    for (size_t n = 2 + random() % 4; t.size() < n;) t += alphabet[random() % alphabet.size()];
    tokens.push_back(t);
  }
  tokens.emplace_back("\xc3\xa9");
  tokens.emplace_back("\xe2\x82");  // the first byte of a character
  return std::make_shared<TokenTrie>(tokens);
}

std::shared_ptr<const Grammar> must(Result<std::shared_ptr<const Grammar>> r) {
  EXPECT_TRUE(r.ok()) << r.status().message();
  return r.ok() ? *r : nullptr;
}

bool matches(const std::shared_ptr<const Grammar>& g, std::string_view text) {
  GrammarMatcher m(g);
  return m.accept_bytes(text) && m.can_end();
}

bool allowed(const std::vector<uint32_t>& mask, int32_t id) {
  return (mask[static_cast<size_t>(id) / 32] >> (id % 32) & 1) != 0;
}

TEST(Regex, MatchesWholeStrings) {
  struct Case {
    const char* pattern;
    std::vector<const char*> yes, no;
  };
  const std::vector<Case> cases = {
      {"abc", {"abc"}, {"", "ab", "abcd"}},
      {"a|bc*", {"a", "b", "bccc"}, {"ac", "c"}},
      {"(?:ab)+?x{2,3}", {"abxx", "ababxxx"}, {"xx", "abx", "abxxxx"}},
      {"[^a-c\\d]\\w", {"dz", "_0"}, {"a0", "1a", "d-"}},
      {"^\\d{3}-\\d{4}$", {"555-1234"}, {"5551234", "x555-1234"}},
      {".", {"a", "\xc3\xa9", "\xf0\x9f\x99\x82"}, {"", "ab", "\n", "\xc3"}},
      {"[\\u00e0-\\u00ff]", {"\xc3\xa9"}, {"e", "\xc4\x80"}},
      {"a{,2}", {"a{,2}"}, {"aa"}},
      {"(a*)*b", {"b", "aaab"}, {"a"}},
      {"[\\s\\S]*", {"", "any\nthing"}, {}},
      {"\\x41\\.\\*", {"A.*"}, {"Ab*"}},
  };
  const auto trie = make_trie();
  for (const Case& c : cases) {
    const auto g = must(Grammar::from_regex(trie, c.pattern));
    for (const char* s : c.yes) EXPECT_TRUE(matches(g, s)) << c.pattern << " on " << s;
    for (const char* s : c.no) EXPECT_FALSE(matches(g, s)) << c.pattern << " on " << s;
  }
}

TEST(Regex, NamesWhatItDoesNotSupport) {
  const auto trie = make_trie();
  for (const auto& [pattern, word] :
       std::vector<std::pair<const char*, const char*>>{{"(?=a)", "look-ahead"},
                                                        {"(?<!a)b", "look-behind"},
                                                        {"(a)\\1", "back-reference"},
                                                        {"\\bx", "boundaries"},
                                                        {"(a", "missing ')'"},
                                                        {"a)", "unbalanced"},
                                                        {"[a", "missing ']'"},
                                                        {"*a", "nothing to repeat"},
                                                        {"[]a]", "no text at all"},
                                                        {"a{3,2}", "out of order"},
                                                        {"a{99999}", "10000"},
                                                        {"a\\", "trailing"}}) {
    const auto g = Grammar::from_regex(trie, pattern);
    ASSERT_FALSE(g.ok()) << pattern;
    EXPECT_NE(g.status().message().find(word), std::string::npos) << g.status().message();
  }
}

TEST(Regex, IsBoundedOnHostilePatterns) {
  const auto trie = make_trie();
  const double begin = cpu_seconds();
  EXPECT_FALSE(Grammar::from_regex(trie, "((((a{1,9999}){1,9999}){1,9999}){1,9999})").ok());
  EXPECT_FALSE(
      Grammar::from_regex(trie, "(a|aa|aaa)*(b|bb){9000}" + std::string(300000, 'x')).ok());
  EXPECT_FALSE(Grammar::from_regex(trie, std::string(100000, '(')).ok());
  const auto ambiguous = Grammar::from_regex(trie, "(a|b|ab|ba){0,2000}c");
  EXPECT_NE(ambiguous.status().message().find("too ambiguous"), std::string::npos);
  (void)Grammar::from_regex(trie, "(.*a){30}.{20}b");  // refused or compiled, but fast
  EXPECT_LT(cpu_seconds() - begin, kSlowBuild ? 120.0 : 10.0);
}

TEST(Ebnf, ReadsRulesAndRefusesLeftRecursion) {
  const auto trie = make_trie();
  const auto g = must(Grammar::from_ebnf(trie, R"g(
# sums
root ::= term ("+" term)*
term ::= number | "(" root ")"
number ::= [1-9] [0-9]{0,2} | "0"
)g"));
  for (const char* s : {"0", "1+23", "(1+(2))+345"}) EXPECT_TRUE(matches(g, s)) << s;
  for (const char* s : {"", "01", "1+", "(1", "1234"}) EXPECT_FALSE(matches(g, s)) << s;
  for (const char* bad : {"root ::= root \"a\"", "root ::= a\na ::= b? a", "root ::= missing",
                          "x ::= \"a\"", "root ::= \"a", "root ::= [a", "root ::= (\"a\"",
                          "root \"a\"", "root ::= \"a\"\nroot ::= \"b\""}) {
    EXPECT_FALSE(Grammar::from_ebnf(trie, bad).ok()) << bad;
  }
}

// The syntax that llama.cpp's parser accepts.
TEST(Ebnf, ReadsTheWholeNotation) {
  struct Case {
    const char* grammar;
    std::vector<const char*> yes, no;
  };
  const std::vector<Case> cases = {
      {R"g(root ::= ("a" | "b") + [0-9] *)g", {"a", "ab1", "b12"}, {"", "1"}},
      {R"g(root ::= "a" {2})g", {"aa"}, {"a", "aaa"}},
      {R"g(root ::= "a"{2, 3} "b" { 1 , } "c"{0,1})g", {"aab", "aaabbc"}, {"ab", "aabcc"}},
      {R"g(root ::= "ab" ?)g", {"", "ab"}, {"a"}},
      {"root ::= (\n  # a comment\n  \"a\" # another\n  | \"b\"\n)\n+", {"ab"}, {"", "c"}},
      {"root ::= \"a\" |\n  \"b\" |\r\n\t\"c\"\r\n", {"a", "b", "c"}, {"ab"}},
      {"# first\r\rroot ::= my-Rule_2\rmy-Rule_2::=\"x\"", {"x"}, {"y"}},
      {R"g(root ::= [\x41-\x43] [\u00e9\U0001F642] "\x21\u00e9\t\"\\\]")g",
       {"A\xc3\xa9!\xc3\xa9\t\"\\]", "C\xf0\x9f\x99\x82!\xc3\xa9\t\"\\]"},
       {"D\xc3\xa9!"}},
      {R"g(root ::= [^\n\]"]+ . [a\-z] [x-])g", {"ab\n-x", "a\n--"}, {"]xax", "ax", "abby"}},
      {R"g(root ::= "" | "a" |)g", {"", "a"}, {"b"}},
      {R"g(root ::= ("a" "b")* ("c"?)+)g", {"", "ababcc"}, {"a"}}};
  const auto trie = make_trie();
  for (const Case& c : cases) {
    const auto g = must(Grammar::from_ebnf(trie, c.grammar));
    if (g == nullptr) continue;
    for (const char* s : c.yes) EXPECT_TRUE(matches(g, s)) << c.grammar << " on " << s;
    for (const char* s : c.no) EXPECT_FALSE(matches(g, s)) << c.grammar << " on " << s;
  }
}

TEST(Ebnf, SaysWhereItIsWrong) {
  const auto trie = make_trie(1, 0);
  for (const auto& [grammar, says] : std::vector<std::pair<const char*, const char*>>{
           {"root ::= \"a\"\nb ::= [a", "line 2, column 7: missing ']'"},
           {"root ::= \"\xc3\xa9\" )", "line 1, column 14: a ')' without a matching '('"},
           {"root ::= \"a\"{,3}", "line 1, column 14: expected a number"},
           {"root ::= \"a\"{3,2}", "line 1, column 14: repetition bounds out of order"},
           {"root ::= \"a\"{1000000}", "line 1, column 14: a repetition of more than 10000"},
           {"root ::= (\"a\"", "line 1, column 14: missing ')'"},
           {"root ::= \n  other", "line 2, column 3: rule 'other' is used but not defined"},
           {"root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: rule 'root' is defined twice"},
           {"root ::= * \"a\"", "line 1, column 10: nothing to repeat"},
           {"root ::= <think>", "line 1, column 10: references to tokens are not supported"},
           {"root ::= !<[12]>", "line 1, column 10: references to tokens are not supported"},
           {"root ::= \"\\q\"", "line 1, column 11: an invalid character or escape"},
           {"root ::= \"\\ud83d\"", "line 1, column 11: half of a surrogate pair"},
           {"root = \"a\"", "line 1, column 6: expected '::='"}}) {
    const auto g = Grammar::from_ebnf(trie, grammar);
    ASSERT_FALSE(g.ok()) << grammar;
    EXPECT_NE(g.status().message().find(says), std::string::npos) << g.status().message();
  }
}

TEST(IntegerRange, AgreesWithArithmetic) {
  const auto trie = make_trie(1, 0);
  std::mt19937_64 random(7);
  for (int round = 0; round < 60; ++round) {
    const int64_t span = int64_t{1} << (1 + round % 14);
    const auto draw = [&] {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(2 * span)) - span;
    };
    const int64_t a = draw();
    const int64_t b = draw();
    const bool has_low = round % 5 != 0;
    const bool has_high = round % 7 != 0;
    const int64_t low = std::min(a, b);
    const int64_t high = std::max(a, b);
    json::Object schema;
    schema["type"] = "integer";
    if (has_low) schema["minimum"] = low;
    if (has_high) schema["maximum"] = high;
    const auto g = must(Grammar::from_json_schema(trie, json::Value(schema)));
    for (int64_t v = -2 * span; v <= 2 * span; v += std::max<int64_t>(1, span / 300)) {
      const bool inside = (!has_low || v >= low) && (!has_high || v <= high);
      ASSERT_EQ(matches(g, std::to_string(v)), inside) << v << " in " << low << ".." << high;
    }
    EXPECT_FALSE(matches(g, "00"));
  }
}

// The mask must contain exactly the tokens that accept() takes, at every position of random
// sentences.
TEST(Matcher, MaskIsWhatAcceptTakes) {
  const auto trie = make_trie();
  json::Value schema =
      *json::parse(R"({"type":"object","properties":{"a":{"type":"array","items":{"type":"number"}},
    "b":{"anyOf":[{"type":"string","maxLength":5},{"$ref":"#"}]},"c":{"enum":["x","true",1.5,null]}},"required":["b"]})");
  const std::vector<std::shared_ptr<const Grammar>> grammars = {
      must(Grammar::from_json_schema(trie, schema)), must(Grammar::any_json_object(trie)),
      must(Grammar::from_json_schema(
          trie, *json::parse(R"({"properties":{"abc":{"type":"string","maxLength":20},
    "abd":{"type":"string","maxLength":3000},"e":{"minimum":0.5}},"type":"object"})"))),
      must(Grammar::from_regex(trie, "(ab|a)*[0-9]{2,}(\"x\"|\\{\\})?")),
      must(Grammar::from_ebnf(trie, "root ::= \"[\" (root | [0-9]+) (\",\" \" \"? root)* \"]\""))};
  std::mt19937 random(3);
  for (const auto& g : grammars) {
    for (int run = 0; run < 8; ++run) {
      GrammarMatcher m(g);
      std::vector<uint32_t> mask(g->mask_words());
      for (int step = 0; step < 40; ++step) {
        m.fill_mask(mask);
        std::vector<int32_t> possible;
        for (int32_t id = 0; id < trie->vocab_size(); ++id) {
          const int before = m.accepted();
          const bool taken = m.accept(id);
          ASSERT_EQ(m.accepted() - before, taken ? 1 : 0);
          if (taken) m.rollback(1);
          ASSERT_EQ(allowed(mask, id), taken)
              << "token '" << trie->token(id) << "' at step " << step;
          if (taken) possible.push_back(id);
        }
        if (possible.empty()) {
          EXPECT_TRUE(m.can_end()) << "a dead end";
          break;
        }
        ASSERT_TRUE(m.accept(possible[random() % possible.size()]));
      }
    }
  }
}

TEST(Matcher, RollsBackToWhereItWas) {
  const auto trie = make_trie();
  const auto g = must(Grammar::any_json_object(trie));
  GrammarMatcher m(g);
  std::vector<uint32_t> before(g->mask_words());
  std::vector<uint32_t> after(g->mask_words());
  ASSERT_TRUE(m.accept('{'));
  m.fill_mask(before);
  ASSERT_TRUE(m.accept('"'));
  ASSERT_TRUE(m.accept('a'));
  EXPECT_FALSE(m.accept('\n'));
  m.rollback(2);
  m.fill_mask(after);
  EXPECT_EQ(before, after);
  EXPECT_EQ(m.accepted(), 1);
}

TEST(Description, TakesEachKindAndRefusesTheRest) {
  const auto trie = make_trie();
  const auto describe = [&](const char* text) {
    return Grammar::from_description(trie, *json::parse(text));
  };
  EXPECT_TRUE(matches(must(describe(R"({"choice": ["yes", "no"]})")), "no"));
  EXPECT_TRUE(matches(must(describe(R"({"regex": "a+"})")), "aa"));
  EXPECT_TRUE(matches(must(describe(R"({"json": "{\"type\": \"integer\"}"})")), "-12"));
  EXPECT_TRUE(
      matches(must(describe(R"({"json_object": true})")), R"({"a": [1, {"b": "\u00e9\n"}]})"));
  EXPECT_TRUE(matches(must(describe(R"({"grammar": "root ::= \"k\""})")), "k"));
  for (const char* bad :
       {"{}", R"({"choice": []})", R"({"choice": [1]})", R"({"regex": 1})", R"({"json": "{"})"}) {
    EXPECT_FALSE(describe(bad).ok()) << bad;
  }
}

// The instance in the spelling of our grammars: named properties first, in schema order.
json::Value in_schema_order(const json::Value& schema, const json::Value& v) {
  if (!v.is_object() || !schema.is_object()) return v;
  json::Object out;
  const json::Value* properties = schema.find("properties");
  if (properties != nullptr && properties->is_object()) {
    for (const auto& [name, sub] : properties->as_object()) {
      if (const json::Value* member = v.find(name)) out[name] = in_schema_order(sub, *member);
    }
  }
  if (const json::Value* required = schema.find("required");
      required != nullptr && required->is_array()) {
    for (const json::Value& name : required->as_array()) {
      const json::Value* member = v.find(name.as_string());
      if (member != nullptr && out.find(name.as_string()) == nullptr)
        out[name.as_string()] = *member;
    }
  }
  for (const auto& [name, value] : v.as_object()) {
    if (out.find(name) == nullptr) out[name] = value;
  }
  return out;
}

TEST(JsonSchema, RefusesByKeywordAndPlace) {
  const auto trie = make_trie(1, 0);
  for (const auto& [schema, place] : std::vector<std::pair<const char*, const char*>>{
           {R"({"properties":{"a/b":{"contains":true}}})", "'contains' at #/properties/a~1b"},
           {R"({"items":{"type":"array","uniqueItems":true}})", "'uniqueItems' at #/items"},
           {R"({"allOf":[{"format":"regex"}]})", "'format' at #/allOf/0"},
           {R"s({"$defs":{"x":{"pattern":"(?=a)"}},"$ref":"#/$defs/x"})s",
            "'pattern' at #/$defs/x"},
           {R"({"$ref":"http://example.com/s"})", "'$ref' at #"},
           {R"({"oneOf":[{"items":{"type":"string"}},{"items":{"minimum":1}}]})", "'oneOf' at #"},
           {R"({"not":{"uniqueItems":true}})", "'uniqueItems' at #/not"},
           {R"({"minLength":-1})", "'minLength' at #"},
           {R"({"type":"string","minLength":3,"maxLength":2})", "no text at all"}}) {
    const auto g = Grammar::from_json_schema(trie, *json::parse(schema));
    ASSERT_FALSE(g.ok()) << schema;
    EXPECT_NE(g.status().message().find(place), std::string::npos) << g.status().message();
    EXPECT_EQ(g.status().message().find('\n'), std::string::npos);
  }
}

// The first keyword that a refusal names.
std::string refused_keyword(const std::string& message) {
  const size_t begin = message.find('\'');
  return begin == std::string::npos
             ? message
             : message.substr(begin, message.find('\'', begin + 1) - begin + 1);
}

// Whether any order of the (few) outermost members matches, compact or with spaces. A schema does
// not define the order of members that it requires conditionally.
bool matches_in_some_order(const std::shared_ptr<const Grammar>& g, const json::Value& v) {
  const auto match = [&](const json::Value& one) {
    const bool compact = matches(g, json::write(one));
    EXPECT_EQ(matches(g, json::write(one, {.spaces = true})), compact) << json::write(one);
    EXPECT_EQ(matches(g, json::write(one, {.indent = 4})), compact) << json::write(one);
    return compact;
  };
  if (!v.is_object() || v.as_object().size() < 2 || v.as_object().size() > 5) return match(v);
  std::vector<std::string> names;
  for (const auto& [name, value] : v.as_object()) names.push_back(name);
  std::sort(names.begin(), names.end());
  do {
    json::Object one;
    for (const std::string& name : names) one[name] = *v.find(name);
    if (match(json::Value(one))) return true;
  } while (std::next_permutation(names.begin(), names.end()));
  return false;
}

// Allowed differences from the suite: constants have one spelling (1 is not written 1.0, members
// keep their order), the parts of an allOf have their own order; times have no leap seconds, host
// names no Punycode, and addresses neither quotes nor literals.
TEST(JsonSchema, AgreesWithTheTestSuite) {
  const std::map<std::string, int> refused_spellings = {{"const.json", 5},
                                                        {"enum.json", 4},
                                                        {"allOf.json", 1},
                                                        {"oneOf.json", 0},
                                                        {"format/hostname.json", 25},
                                                        {"format/time.json", 6},
                                                        {"format/date-time.json", 2},
                                                        {"format/email.json", 5}};
  const auto trie = make_trie(1, 0);
  auto suite = json::parse_file(FRESHET_UNPACKED_DATA "/grammar/json_schema_suite.json");
  ASSERT_TRUE(suite.ok()) << suite.status().message();
  int checked = 0;
  int skipped = 0;
  std::map<std::string, int> refused;
  std::map<std::string, int> refusals;
  for (const auto& [file, groups] : suite->as_object()) {
    for (const json::Value& group : groups.as_array()) {
      const auto g = Grammar::from_json_schema(trie, *group.find("schema"));
      const bool nothing = !g.ok() && g.status().message().ends_with("no text at all");
      if (!g.ok() && !nothing) {
        EXPECT_EQ(g.status().code(), StatusCode::kUnsupported)
            << file << ": " << g.status().message();
        ++refusals[refused_keyword(g.status().message())];
        skipped += static_cast<int>(group.find("tests")->as_array().size());
        continue;
      }
      for (const json::Value& test : group.find("tests")->as_array()) {
        const json::Value ordered = in_schema_order(*group.find("schema"), *test.find("data"));
        const std::string data = json::write(ordered);
        if (test.get_string("description", "").ends_with("only an annotation by default"))
          continue;  // we are stricter here
        const bool valid = test.get_bool("valid", false);
        const bool matched = !nothing && matches_in_some_order(*g, ordered);
        ++checked;
        if (valid && !matched && refused_spellings.contains(file)) ++refused[file];
        const bool excused = valid && refused_spellings.contains(file);
        if (!excused) {
          EXPECT_EQ(matched, valid) << file << ": " << group.get_string("description", "") << ": "
                                    << test.get_string("description", "") << ": " << data;
        }
      }
    }
  }
  for (const auto& [file, count] : refused) EXPECT_LE(count, refused_spellings.at(file)) << file;
  EXPECT_GT(checked, 450);
  for (const auto& [keyword, count] : refusals)
    std::printf("%d schemas refused for %s\n", count, keyword.c_str());
  std::printf("%d instances checked, %d of refused schemas\n", checked, skipped);
}

}  // namespace
}  // namespace freshet::grammar

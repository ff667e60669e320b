#include "tokenizer/template/chat_template.h"

#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

const std::string kFolder = FRESHET_SOURCE_DIR "/tests/data/templates";

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

json::Value golden(const std::string& name) {
  return json::parse_file(FRESHET_UNPACKED_DATA "/templates/" + name).value();
}

ChatTemplate::Options at_noon() {
  using namespace std::chrono;
  return {.now = local_days(2024y / July / 26) + 12h + 30min};
}

json::Value context_of(const json::Value& file, const std::string& name) {
  json::Object context;
  context["add_generation_prompt"] = true;
  context["bos_token"] = file.get_string("bos_token", "");
  context["eos_token"] = file.get_string("eos_token", "");
  for (const auto& [key, value] : file.find("cases")->find(name)->as_object()) context[key] = value;
  return context;
}

// jinja2's message without the exception's name, if we give the message in the same words.
std::string shared_words(const std::string& error) {
  const size_t colon = error.find(": ");
  const std::string kind = error.substr(0, colon);
  const bool shared = kind == "UndefinedError" || kind == "TemplateError" || kind == "TypeError";
  return shared ? error.substr(colon + 2) : "";
}

// Renders every case of a golden file and compares outputs with outputs, and errors with errors.
void check_golden(const std::string& name, size_t least) {
  const json::Value file = golden(name);
  size_t outputs = 0;
  for (const auto& [path, cases] : file.find("expected")->as_object()) {
    if (cases.find("compile_error") != nullptr) continue;
    const auto compiled = ChatTemplate::compile(read(kFolder + "/" + path));
    ASSERT_TRUE(compiled.ok()) << path << ": " << compiled.status().message();
    for (const auto& [id, expected] : cases.as_object()) {
      SCOPED_TRACE(path + " " + id);
      const auto actual = compiled->render(context_of(file, id), at_noon());
      if (const json::Value* output = expected.find("output")) {
        ++outputs;
        ASSERT_TRUE(actual.ok()) << actual.status().message();
        EXPECT_EQ(*actual, output->as_string());
      } else {
        ASSERT_FALSE(actual.ok()) << *actual;
        EXPECT_THAT(actual.status().message(), HasSubstr("chat template, line "));
        EXPECT_THAT(actual.status().message(),
                    HasSubstr(shared_words(expected.get_string("error", ""))));
      }
    }
  }
  EXPECT_GE(outputs, least);
}

TEST(ChatTemplate, EqualsJinja2OnEveryTemplate) {
  check_golden("golden.json", 600);
}

// Templates that mark the assistant's part, which jinja2 accepts only with transformers' extension.
TEST(ChatTemplate, EqualsJinja2WithGenerationTags) {
  check_golden("golden_generation.json", 30);
}

// Small templates for each part of the language.
TEST(ChatTemplate, EqualsJinja2OnEveryFeature) {
  const json::Value file = golden("golden_features.json");
  const json::Value& context = *file.find("context");
  size_t outputs = 0;
  size_t errors = 0;
  for (const json::Value& c : file.find("cases")->as_array()) {
    const std::string source = c.get_string("source", "");
    const auto compiled = ChatTemplate::compile(source);
    const auto actual = compiled.ok() ? compiled->render(context, at_noon()) : compiled.status();
    if (const json::Value* output = c.find("output")) {
      ++outputs;
      EXPECT_EQ(actual.ok() ? *actual : actual.status().message(), output->as_string()) << source;
    } else {
      ++errors;
      EXPECT_FALSE(actual.ok()) << source << "\ngave: " << *actual
                                << "\nwanted: " << c.get_string("error", "");
    }
  }
  EXPECT_GE(outputs, 500U);
  EXPECT_GE(errors, 60U);
}

TEST(ChatTemplate, RendersFromManyThreads) {
  const json::Value file = golden("golden.json");
  const auto compiled = ChatTemplate::compile(read(kFolder + "/Qwen-Qwen3-0.6B.jinja"));
  ASSERT_TRUE(compiled.ok());
  const json::Value context = context_of(file, "tool_round");
  const std::string expected = compiled->render(context, at_noon()).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i)
        EXPECT_EQ(compiled->render(context, at_noon()).value(), expected);
    });
  }
  for (auto& t : threads) t.join();
}

Status run(std::string_view source, const json::Value& context = json::Object(),
           const TemplateLimits& limits = {}) {
  const auto compiled = ChatTemplate::compile(source, limits);
  return compiled.ok() ? compiled->render(context).status() : compiled.status();
}

TEST(ChatTemplate, ErrorsNameTheLine) {
  EXPECT_EQ(run("a\nb {{ x.y }}").message(), "chat template, line 2: 'x' is undefined");
  EXPECT_EQ(run("{% if x %}\n\n{% foo %}{% endif %}").message(),
            "chat template, line 3: unknown tag 'foo'");
  EXPECT_EQ(run("{% macro m() %}\n{{ 1 / 0 }}{% endmacro %}\n\n{{ m() }}").message(),
            "chat template, line 2: division by zero");
  EXPECT_EQ(run("\n\n{{ 'a }}").message(), "chat template, line 3: a string is not closed");
  EXPECT_THAT(run("{% include 'x' %}").message(), HasSubstr("'include' is not supported"));
  EXPECT_THAT(run("{% import 'x' as y %}").message(), HasSubstr("'import' is not supported"));
  EXPECT_THAT(run("{% extends 'x' %}").message(), HasSubstr("'extends' is not supported"));
  EXPECT_THAT(run("{{ raise_exception('No system role') }}").message(),
              HasSubstr("No system role"));
  EXPECT_THAT(run("{{ [].append(1) }}").message(), HasSubstr("may not do"));
  EXPECT_THAT(run("\xff").message(), HasSubstr("byte 0 is not UTF-8"));
}

TEST(ChatTemplate, MentionsItsVariables) {
  const auto t =
      ChatTemplate::compile("{% if tools is defined %}{{ messages[0].content }}{% endif %}");
  EXPECT_TRUE(t->mentions("tools"));
  EXPECT_TRUE(t->mentions("messages"));
  EXPECT_FALSE(t->mentions("content"));
  EXPECT_FALSE(t->mentions("enable_thinking"));
}

TEST(ChatTemplate, NumbersOfTheContextKeepTheirText) {
  const json::Value context = json::parse(R"({"x":[18446744073709551615,1.10,1e5,-0]})").value();
  const auto t = ChatTemplate::compile("{{ x|tojson }}");
  EXPECT_EQ(t->render(context).value(), "[18446744073709551615, 1.1, 100000.0, 0]");
  EXPECT_EQ(ChatTemplate::compile("{{ x[0] + 1 }}")->render(context).value(),
            "18446744073709551616");
}

// Each must stop at a limit, quickly, and name that limit.
class HostileTemplate : public testing::TestWithParam<const char*> {};

TEST_P(HostileTemplate, EndsWithAnError) {
  TemplateLimits limits;
  limits.steps = 4'000'000;
  limits.memory_bytes = size_t{64} << 20;
  const std::clock_t start = std::clock();
  const Status status = run(GetParam(), json::parse(R"({"x":["a","b","c"]})").value(), limits);
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.message(),
              testing::AnyOf(HasSubstr("limit"), HasSubstr("nested too deeply"),
                             HasSubstr("more than 4300 digits"), HasSubstr("Max string recursion")))
      << GetParam();
  EXPECT_LT(seconds, 30.0) << GetParam();  // less than one second; sanitizers take much longer
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileTemplate,
    testing::Values(
        "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}", "{{ [0] * 10**12 }}",
        "{{ 10**10000 }}", "{{ 7**99999999999999999999 }}",
        "{% set n = namespace(v=3) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}{% endfor %}",
        "{% for i in range(99999) %}{{ 3**9000 // 7 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}",
        "{% for a in x recursive %}{{ loop(x) }}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% "
        "endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor "
        "%}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor "
        "%}",
        "{% set n = namespace(v=[1]) %}{% for i in range(99) %}{% set n.v = n.v + n.v %}{% endfor "
        "%}",
        "{% set n = namespace(v=[1]) %}{% for i in range(99) %}{% set n.v = [n.v, n.v] %}{% endfor "
        "%}{{ n.v }}",
        "{% set n = namespace(v=[1]) %}{% for i in range(99) %}{% set n.v = [n.v, n.v] %}{% endfor "
        "%}{{ n.v|tojson }}",
        "{% set n = namespace(v=[1],w=[1]) %}{% for i in range(99) %}{% set n.v = [n.v, n.v] %}"
        "{% set n.w = [n.w, n.w] %}{% endfor %}{{ n.v == n.w }}",
        "{% set n = namespace(v=[1]) %}{% for i in range(9999) %}{% set n.v = [n.v] %}{% endfor %}",
        "{% set n = namespace() %}{% set n.n = n %}{{ n }}",
        "{{ ('a' * 1000000)|replace('', 'b' * 1000000) }}", "{{ ('a,' * 9000000).split(',') }}",
        "{{ ('a\n' * 1000000)|indent(1000000) }}", "{{ 'a'|indent(99999999999) }}",
        "{{ x|batch(99999999999, 'x')|list }}", "{{ x|slice(99999999999)|list }}",
        "{{ 'x'.center(99999999999) }}", "{{ '%999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}", "{{ '{:.999999f}'.format(1.5) }}",
        "{{ '\t'.expandtabs(99999999999) }}", "{{ '1'.zfill(99999999999) }}",
        "{{ x|tojson(indent=99999999999) }}", "{{ ('x' * 1000000).join('y' * 1000000) }}",
        "{{ ('x' * 10000000)|list }}",
        "{% for i in range(99999) %}{{ ('a' * 100000)|upper }}{% endfor %}",
        "{% for i in range(99999) %}{{ ('a' * 1000000 + 'b') in ('a' * 9000000) }}{% endfor %}",
        "{% for i in range(99999) %}{% if ('a' * 1000000) == ('a' * 1000000) %}{% endif %}{% "
        "endfor %}",
        "{% for i in range(99999) %}{% macro m() %}{% endmacro %}{% set q %}{% for j in "
        "range(9999) %}"
        "{% macro k() %}{% endmacro %}{% endfor %}{% endset %}{% endfor %}",
        "{{ '{0:{0:{0:{0}}}}'.format(1) }}"));

TEST(ChatTemplate, DeepSourcesAreRefused) {
  const auto nested = [](std::string_view open, std::string_view close, int n) {
    std::string s;
    for (int i = 0; i < n; ++i) s += open;
    s += "1";
    for (int i = 0; i < n; ++i) s += close;
    return s;
  };
  for (const auto& [open, close] : {std::pair("(", ")"), std::pair("[", "]"), std::pair("{1:", "}"),
                                    std::pair("not ", ""), std::pair("-", ""), std::pair("f(", ")"),
                                    std::pair("1 if 1 else ", ""), std::pair("x[", "]")}) {
    EXPECT_FALSE(run("{{ " + nested(open, close, 50'000) + " }}").ok()) << open;
  }
  EXPECT_FALSE(run(nested("{% if 1 %}", "{% endif %}", 20'000)).ok());
  EXPECT_FALSE(run(nested("{% for (", ") in x %}{% endfor %}", 20'000)).ok());
  // Long chains are parsed without recursion; rendering them has a limit.
  EXPECT_FALSE(run("{{ 1" + nested("+1", "", 100'000) + " }}").ok());
  EXPECT_FALSE(run("{{ x" + nested(".a", "", 100'000) + " }}").ok());
  EXPECT_FALSE(run("{{ x" + nested("|e", "", 100'000) + " }}").ok());
  EXPECT_TRUE(run("{{ 1" + nested("+1", "", 500) + " }}").ok());
  EXPECT_TRUE(run("{{ 1" + nested("~1", "", 10'000) + " }}").ok());
  EXPECT_TRUE(run("{% if 0 %}" + nested("{% elif 0 %}", "", 10'000) + "{% endif %}").ok());
}

TEST(ChatTemplate, DeepContextsAreRefused) {
  std::string deep = "{\"x\":";
  for (int i = 0; i < 5'000; ++i) deep += "[";
  for (int i = 0; i < 5'000; ++i) deep += "]";
  deep += "}";
  const json::Value context = json::parse(deep, {.depth = 6'000}).value();
  EXPECT_THAT(run("{{ x }}", context).message(), HasSubstr("limit on the nesting"));
  EXPECT_TRUE(run("{{ y }}", context).ok());
}

// Chains of namespaces, loops and macros can be long and cyclic: freeing them must not recurse.
TEST(ChatTemplate, ChainsOfMutableValuesAreFreed) {
  EXPECT_TRUE(run("{% set n = namespace(head=none) %}{% for i in range(99999) %}"
                  "{% set n.head = namespace(next=n.head) %}{% endfor %}")
                  .ok());
  EXPECT_TRUE(
      run("{% set n = namespace(a=[]) %}{% for i in range(9999) %}{% for j in [1] %}"
          "{% if loop.changed(n.a) %}{% endif %}{% set n.a = [loop] %}{% endfor %}{% endfor %}")
          .ok());
  EXPECT_TRUE(run("{% set n = namespace() %}{% set n.self = [n, {'n': n}] %}"
                  "{% macro m() %}{{ n }}{% endmacro %}{% set n.m = m %}")
                  .ok());
  EXPECT_TRUE(run("{% for i in [1] %}{% if loop.changed(loop) %}{% endif %}{% endfor %}").ok());
}

TEST(ChatTemplate, LimitsCanBeSet) {
  TemplateLimits limits;
  limits.output_bytes = 10;
  EXPECT_TRUE(run("0123456789", json::Object(), limits).ok());
  EXPECT_THAT(run("0123456789a", json::Object(), limits).message(), HasSubstr("limit on output"));
  limits = {};
  limits.steps = 100;
  EXPECT_THAT(run("{% for i in range(99) %}{% endfor %}", json::Object(), limits).message(),
              HasSubstr("limit on steps"));
  EXPECT_EQ(run("{% for i in range(99) %}{% endfor %}", json::Object(), limits).code(),
            StatusCode::kResourceExhausted);
  limits = {};
  limits.source_bytes = 3;
  EXPECT_FALSE(run("abcd", json::Object(), limits).ok());
}

}  // namespace
}  // namespace freshet

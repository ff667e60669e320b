#include "base/json.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/test_clock.h"

namespace freshet::json {
namespace {

using testing::HasSubstr;
using namespace std::string_literals;

// Verdicts of RFC 8259, in the style of JSONTestSuite; nlohmann's parser must agree.
const std::string kValid[] = {"0",
                              "-0",
                              "1",
                              "-1",
                              "10",
                              "0.0",
                              "1.5",
                              "-0.5e-3",
                              "1E5",
                              "1e+5",
                              "123456789012345678901234567890",
                              "0e1",
                              "0e+1",
                              "1.0E-2",
                              "\"\"",
                              "\"a\"",
                              "\"\\u0000\"",
                              "\"\\uD834\\uDD1E\"",
                              "\"\\uDBFF\\uDFFF\"",
                              "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
                              "\"\x7f\"",
                              "\"\xc2\x80\"",
                              "\"\xed\x9f\xbf\"",
                              "\"\xee\x80\x80\"",
                              "\"\xf4\x8f\xbf\xbf\"",
                              "\"\xef\xbf\xbe\"",
                              "\"\xef\xbb\xbf\"",
                              "\"\\u2028\xe2\x80\xa8\"",
                              "true",
                              "false",
                              "null",
                              "[]",
                              "{}",
                              "[[]]",
                              "[{}]",
                              "[1,2,3]",
                              "[1,null,true,\"x\"]",
                              " [ 1 , 2 ] ",
                              "\t\n\r [] \r\n\t",
                              "{\"a\":1}",
                              "{\"\":0}",
                              "{\"a\":1,\"a\":2}",
                              "{\"\\u0000\":1}",
                              "{ \"a\" : { \"b\" : [ ] } }",
                              "[[],[[]]]",
                              "[\"\\uFFFF\"]",
                              "[\"\\\\n\"]",
                              "[1e-2, -0.0]",
                              "\"\\/\"",
                              "[-0]",
                              "[0e0]"};
const std::string kInvalid[] = {"",
                                " ",
                                "\n",
                                "[",
                                "]",
                                "{",
                                "}",
                                "[1",
                                "[1,",
                                "[1,]",
                                "[,1]",
                                "[,]",
                                "[1 2]",
                                "[1,,2]",
                                "[1]]",
                                "[1}",
                                "{1:2}",
                                "{\"a\"}",
                                "{\"a\":}",
                                "{\"a\":1,}",
                                "{,}",
                                "{\"a\" 1}",
                                "{\"a\":1 \"b\":2}",
                                "{\"a\":1]",
                                "{a:1}",
                                "{'a':1}",
                                "{\"a\":1,,\"b\":2}",
                                "{null:1}",
                                "{\"a\"::1}",
                                "{\"a\":1:2}",
                                "+1",
                                "01",
                                "-01",
                                "-",
                                "--1",
                                "1.",
                                ".5",
                                "-.5",
                                "1e",
                                "1e+",
                                "1.e5",
                                "1.5e",
                                "0x10",
                                "1_000",
                                "1 2",
                                "0.1.2",
                                "1e5.5",
                                "2.e",
                                "-1x",
                                "Infinity",
                                "-Infinity",
                                "NaN",
                                "nan",
                                "inf",
                                "tru",
                                "truee",
                                "True",
                                "TRUE",
                                "nul",
                                "nulll",
                                "fals",
                                "undefined",
                                "\"",
                                "\"a",
                                "'a'",
                                "a",
                                "\"\\\"",
                                "\"\\x00\"",
                                "\"\\a\"",
                                "\"\\u\"",
                                "\"\\u12\"",
                                "\"\\u123g\"",
                                "\"\\u 123\"",
                                "\"\\u+123\"",
                                "\"\\U0041\"",
                                "\"\\uD800\"",
                                "\"\\uD800x\"",
                                "\"\\uD800\\n\"",
                                "\"\\uD800\\uD800\"",
                                "\"\\uDC00\"",
                                "\"\\uDC00\\uD800\"",
                                "\"\\uD800\\u\"",
                                "\"\t\"",
                                "\"\n\"",
                                "\"\x1f\"",
                                "\"\0\""s,
                                "\0"s,
                                "[\0]"s,

                                "\"\x80\"",
                                "\"\xc0\xaf\"",
                                "\"\xc1\xbf\"",
                                "\"\xc2\"",
                                "\"\xe0\x80\xaf\"",
                                "\"\xe0\x9f\xbf\"",
                                "\"\xed\xa0\x80\"",
                                "\"\xed\xbf\xbf\"",
                                "\"\xf0\x80\x80\xaf\"",
                                "\"\xf4\x90\x80\x80\"",
                                "\"\xf5\x80\x80\x80\"",
                                "\"\xff\"",
                                "\"\xe2\x82\"",
                                "\"\xf0\x9f\x99\"",
                                "\"\xe2\x82",
                                "\"\xfe\xff\"",
                                "[1] x",
                                "[1]#",
                                "// c\n1",
                                "/* c */ 1",
                                "[1/**/]",
                                "\f1",
                                "\v1",
                                "\xc2\xa0"
                                "1",
                                "[\xe3\x80\x80]",
                                "<html>",
                                "{\"a\":\"b\"}}",
                                "[\"a\",\n4\n,1",
                                "[\"a\"",
                                "{\"a\":\"b",
                                "\"\\",
                                "[\"\\",
                                "[tru]",
                                "[1,\n1\n,1",
                                "{\"x\", null}",
                                "[\"x\", truth]",
                                "*",
                                "\\u0031"};

TEST(JsonParse, TakesWhatTheRfcTakes) {
  for (const std::string& text : kValid) {
    EXPECT_TRUE(nlohmann::json::accept(text)) << text;
    const auto ours = parse(text);
    ASSERT_TRUE(ours.ok()) << text << ": " << ours.status().message();
    EXPECT_EQ(nlohmann::json::parse(write(*ours)), nlohmann::json::parse(text)) << text;
    EXPECT_EQ(parse(write(*ours)).value(), *ours) << text;
  }
}

TEST(JsonParse, RefusesWhatTheRfcRefuses) {
  for (const std::string& text : kInvalid) {
    EXPECT_FALSE(nlohmann::json::accept(text)) << text;
    const auto ours = parse(text);
    ASSERT_FALSE(ours.ok()) << text;
    EXPECT_EQ(ours.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(ours.status().message(), HasSubstr("JSON at byte ")) << text;
  }
}

// nlohmann treats NUL as the end of the text; RFC 8259 does not.
TEST(JsonParse, NulIsNotTheEnd) {
  EXPECT_FALSE(parse("1\0"s).ok());
}

TEST(JsonParse, EveryPrefixOfADocumentIsRefused) {
  const std::string text = R"({"a":[1.5e3,"x\u00e9\ud83d\ude42",true,{"b":null}],"c":"é🙂"})";
  ASSERT_TRUE(parse(text).ok());
  for (size_t n = 0; n < text.size(); ++n) EXPECT_FALSE(parse(text.substr(0, n)).ok()) << n;
}

TEST(JsonParse, AgreesWithNlohmannOnMutations) {
  const std::string text = R"({"a":[1.5e3,-0,"x\u00e9\ud83d\ude42",true,{"b":null}],"c":"é"})";
  for (size_t i = 0; i < text.size(); ++i) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string mutated = text;
      mutated[i] = static_cast<char>(byte);
      ASSERT_EQ(parse(mutated).ok(), nlohmann::json::accept(mutated)) << mutated;
    }
  }
}

TEST(JsonParse, ErrorsSayWhereAndWhat) {
  EXPECT_EQ(parse("[1,2").status().message(),
            "JSON at byte 4: expected ',' or ']', but the text ends");
  EXPECT_EQ(parse("{\"a\" 1}").status().message(), "JSON at byte 5: expected ':'");
  EXPECT_EQ(parse("{\"a\":tru}").status().message(), "JSON at byte 5: expected a value");
  EXPECT_EQ(parse("\xef\xbb\xbf{}").status().message(), "JSON at byte 0: expected a value");
}

TEST(JsonParse, DepthIsLimited) {
  for (const char* unit : {"[", "{\"a\":"}) {
    std::string deep;
    for (int i = 0; i < 100'000; ++i) deep += unit;
    const auto result = parse(deep);
    ASSERT_FALSE(result.ok());
    EXPECT_THAT(result.status().message(), HasSubstr("nested deeper than 128 levels"));
  }
  EXPECT_TRUE(parse(std::string(128, '[') + std::string(128, ']')).ok());
  EXPECT_FALSE(parse(std::string(129, '[') + std::string(129, ']')).ok());
}

TEST(JsonParse, BytesAreLimited) {
  ParseLimits limits;
  limits.bytes = 4;
  EXPECT_TRUE(parse("1234", limits).ok());
  EXPECT_EQ(parse("12345", limits).status().code(), StatusCode::kResourceExhausted);
}

TEST(JsonParse, BigDocumentIsFast) {
  std::string text = "{";
  for (int i = 0; i < 128'000; ++i) {
    fmt::format_to(std::back_inserter(text), "{}\"token number {:x} padded to some length\":{}",
                   i ? "," : "", i, i);
  }
  text += "}";
  ASSERT_GT(text.size(), 5'500'000U);
  const double start = cpu_seconds();
  const auto result = parse(text);
  const double taken = cpu_seconds() - start;
  ASSERT_TRUE(result.ok());
  const Object& object = result->as_object();
  EXPECT_EQ(object.size(), 128'000U);
  EXPECT_EQ(object.find("token number 1f3ff padded to some length")->as_int64(), 127'999);
  EXPECT_EQ(object.find("token number 1f400 padded to some length"), nullptr);
  EXPECT_LT(taken, 5.0);  // about 0.05 s; the bound only catches quadratic growth
  EXPECT_EQ(write(*result), text);
}

TEST(JsonParse, FileErrorsNameTheFile) {
  EXPECT_EQ(parse_file("no/such.json").status().code(), StatusCode::kNotFound);
  const std::string path = testing::TempDir() + "freshet_bad.json";
  std::ofstream(path) << "{\"a\":";
  EXPECT_THAT(parse_file(path).status().message(), HasSubstr(path + ": JSON at byte 5"));
  std::ofstream(path) << "";
  EXPECT_FALSE(parse_file(path).ok());
  std::remove(path.c_str());
}

TEST(JsonValue, DeepValuesTakeConstantStack) {
  ParseLimits limits;
  limits.depth = 3'000'000;
  for (const auto& [open, close] : {std::pair("[", "]"), std::pair("{\"a\":", "}")}) {
    std::string text;
    for (int i = 0; i < 1'000'000; ++i) text += open;
    text += "1";
    for (int i = 0; i < 1'000'000; ++i) text += close;
    const auto value = parse(text, limits);
    ASSERT_TRUE(value.ok());
    const Value copy = *value;  // NOLINT: the copy is the test
    EXPECT_TRUE(copy == *value);
    EXPECT_EQ(write(copy), text);
  }
}

TEST(JsonValue, ObjectsKeepOrderAndTheLastDuplicate) {
  const Value v = parse(R"({"b":1,"a":2,"b":[3],"c":4})").value();
  EXPECT_EQ(write(v), R"({"b":[3],"a":2,"c":4})");
  EXPECT_TRUE(v == parse(R"({"a":2.0,"c":4,"b":[3]})").value());
  EXPECT_FALSE(v == parse(R"({"a":2,"c":4,"b":[4]})").value());
}

TEST(JsonValue, ObjectsFindAndEraseAtEverySize) {
  for (int n : {0, 1, 7, 8, 9, 15, 16, 17, 100, 1000}) {
    Object o;
    for (int i = 0; i < n; ++i) o[std::to_string(i * 7)] = i;
    EXPECT_EQ(o.size(), static_cast<size_t>(n));
    for (int i = 0; i < n; i += 3) EXPECT_TRUE(o.erase(std::to_string(i * 7)));
    EXPECT_FALSE(o.erase("absent"));
    for (int i = 0; i < n; ++i) {
      const Value* found = std::as_const(o).find(std::to_string(i * 7));
      ASSERT_EQ(found == nullptr, i % 3 == 0) << n << " " << i;
      if (found != nullptr) {
        EXPECT_EQ(found->as_int64(), i);
      }
    }
    EXPECT_EQ(o.find("1"), nullptr);
  }
}

TEST(JsonValue, AssignmentFromWithin) {
  Value v = parse("[[1,[2]],{\"k\":{\"m\":[3]}}]").value();
  v = Value(v.as_array()[1]);
  EXPECT_EQ(write(v), R"({"k":{"m":[3]}})");
  v = std::move(*v.as_object().find("k"));
  EXPECT_EQ(write(v), R"({"m":[3]})");
  Object o;
  o["x"] = Object();
  o["x"].as_object()["y"] = 5;
  o = std::move(o["x"].as_object());
  EXPECT_EQ(write(o), R"({"y":5})");
}

TEST(JsonValue, NumbersKeepTheirTextAndValue) {
  EXPECT_EQ(write(parse("[1.10,1e5,-0,18446744073709551616]").value()),
            "[1.10,1e5,-0,18446744073709551616]");
  EXPECT_EQ(parse("9223372036854775807")->as_int64(), INT64_MAX);
  EXPECT_EQ(parse("-9223372036854775808")->as_int64(), INT64_MIN);
  EXPECT_EQ(parse("9223372036854775808")->as_int64(), std::nullopt);
  EXPECT_EQ(parse("3.0")->as_int64(), 3);
  EXPECT_EQ(parse("1e3")->as_int64(), 1000);
  EXPECT_EQ(parse("3.5")->as_int64(), std::nullopt);
  EXPECT_EQ(parse("1e19")->as_int64(), std::nullopt);
  EXPECT_EQ(parse("1e99999")->as_int64(), std::nullopt);
  EXPECT_TRUE(parse("3")->is_integer());
  EXPECT_FALSE(parse("3.0")->is_integer());
  EXPECT_TRUE(*parse("3") == *parse("3.0"));
  EXPECT_FALSE(*parse("9007199254740993") == *parse("9007199254740992"));
  EXPECT_EQ(write(Value(uint64_t{18446744073709551615U})), "18446744073709551615");
  EXPECT_EQ(write(Array{Value(NAN), Value(INFINITY), Value(-INFINITY), Value(2.0)}),
            "[null,null,null,2.0]");
}

TEST(JsonValue, ForgivingLookups) {
  const Value v = parse(R"({"i":3,"d":2.5,"s":"x","b":true,"n":null})").value();
  EXPECT_EQ(v.get_int("i", 9), 3);
  EXPECT_EQ(v.get_int("d", 9), 9);
  EXPECT_EQ(v.get_int("s", 9), 9);
  EXPECT_EQ(v.get_double("d", 0), 2.5);
  EXPECT_EQ(v.get_string("s", "-"), "x");
  EXPECT_EQ(v.get_string("i", "-"), "-");
  EXPECT_TRUE(v.get_bool("b", false));
  EXPECT_TRUE(v.find("n")->is_null());
  EXPECT_EQ(v.find("absent"), nullptr);
  EXPECT_EQ(Value(1).find("i"), nullptr);
}

TEST(JsonFile, HasPythonsInfinityAndNaN) {
  const std::string path = ::testing::TempDir() + "/python.json";
  std::ofstream(path) << R"({"a": [0.0, Infinity], "b": -Infinity, "c": NaN})";
  const Result<Value> v = parse_file(path);
  ASSERT_TRUE(v.ok()) << v.status().message();
  EXPECT_TRUE(v->find("a")->as_array()[1].is_number());
  EXPECT_EQ(v->find("a")->as_array()[1].as_double(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(v->find("b")->as_double(), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(v->find("c")->as_double()));
  EXPECT_FALSE(parse("[Infinity]").ok());  // JSON has none
  EXPECT_FALSE(parse("[NaN]").ok());
}

const Value& golden() {
  static const Value value =
      parse_file(FRESHET_SOURCE_DIR "/tests/data/base/json_python.json").value();
  return value;
}

TEST(JsonWrite, EqualsPythonsDumps) {
  for (const Value& c : golden().find("dumps")->as_array()) {
    const Value v = parse(c.get_string("text", "")).value();
    EXPECT_EQ(write(v), c.get_string("compact", ""));
    EXPECT_EQ(write(v, {.spaces = true}), c.get_string("python", ""));
    EXPECT_EQ(write(v, {.ascii = true, .spaces = true}), c.get_string("ascii", ""));
    EXPECT_EQ(write(v, {.indent = 3}), c.get_string("indent", ""));
    EXPECT_EQ(write(v, {.spaces = true, .sort_keys = true}), c.get_string("sorted", ""));
  }
}

TEST(JsonWrite, NumbersEqualPythonsRepr) {
  for (const Value& c : golden().find("floats")->as_array()) {
    const std::string& bits = c.as_array()[0].as_string();
    uint64_t u = 0;
    std::from_chars(bits.data(), bits.data() + bits.size(), u, 16);
    const auto d = std::bit_cast<double>(u);
    EXPECT_EQ(number_text(d), c.as_array()[1].as_string());
    EXPECT_EQ(std::bit_cast<uint64_t>(parse(number_text(d))->as_double()), u);
  }
}

TEST(JsonParse, NumbersEqualPythonsFloat) {
  for (const Value& c : golden().find("reads")->as_array()) {
    const std::string& text = c.as_array()[0].as_string();
    EXPECT_EQ(number_text(parse(text)->as_double()), c.as_array()[1].as_string()) << text;
  }
}

TEST(JsonWrite, InvalidUtf8BecomesTheReplacementCharacter) {
  std::string out;
  append_quoted(out, "a\xff\xe2\x82z\xed\xa0\x80");
  EXPECT_EQ(out, "\"a\xef\xbf\xbd\xef\xbf\xbdz\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
  EXPECT_TRUE(parse(out).ok());
}

}  // namespace
}  // namespace freshet::json

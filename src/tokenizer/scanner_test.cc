// The hand-written scanners against their equivalent expressions, matched by PCRE2.
#include "tokenizer/scanner.h"

#include <random>

#include <gtest/gtest.h>

#include "tokenizer/regex.h"

namespace freshet::tokenizer {
namespace {

using Words = ScanRules::Words;
using Contractions = ScanRules::Contractions;

// Characters of every kind, in particular those that patterns name.
std::string random_text(std::mt19937& rng) {
  static const std::vector<std::string> kParts = {"a",
                                                  "b",
                                                  "Z",
                                                  "Q",
                                                  "é",
                                                  "ß",
                                                  "ſ",
                                                  "İ",
                                                  "ǅ",
                                                  "ʰ",
                                                  "你",
                                                  "あ",
                                                  "я",
                                                  "Ж",
                                                  "1",
                                                  "٣",
                                                  "½",
                                                  "Ⅷ",
                                                  " ",
                                                  " ",
                                                  "  ",
                                                  "\n",
                                                  "\r",
                                                  "\r\n",
                                                  "\t",
                                                  "\u00a0",
                                                  "\u3000",
                                                  "\u0085",
                                                  "\u2028",
                                                  "'",
                                                  "'s",
                                                  "'S",
                                                  "'ll",
                                                  "'LL",
                                                  "'Re",
                                                  "'ve",
                                                  "'ſ",
                                                  "'t",
                                                  "'d",
                                                  "'m",
                                                  "'x",
                                                  "’s",
                                                  ".",
                                                  ",",
                                                  "!",
                                                  "/",
                                                  "/",
                                                  "-",
                                                  "_",
                                                  "$",
                                                  "+",
                                                  "<",
                                                  "\u0301",
                                                  "\u0903",
                                                  "\u20dd",
                                                  "\u200d",
                                                  "\u200b",
                                                  "🙂",
                                                  std::string(1, '\0'),
                                                  "\x7f",
                                                  "«"};
  std::string text;
  for (size_t n = rng() % 40 + 1; n > 0; --n) {
    if (rng() % 16 != 0) {
      text += kParts[rng() % kParts.size()];
      continue;
    }
    // The two libraries differ by one Unicode version: use only blocks that did not change.
    const char32_t code = rng() % 0x600;
    append_utf8(text, code);
  }
  return text;
}

std::vector<std::string> words_by_scanner(const ScanRules& rules, const std::string& text) {
  std::vector<std::string> words;
  for (size_t i = 0; i < text.size();) {
    const size_t end = scan_word(rules, text, i);
    if (end <= i) {
      ADD_FAILURE() << "no progress at " << i;
      break;
    }
    words.push_back(text.substr(i, end - i));
    i = end;
  }
  return words;
}

std::vector<std::string> words_by_regex(const Regex& regex, const std::string& text) {
  std::vector<std::string> words;
  size_t done = 0;
  regex.for_each_match(text, [&](size_t begin, size_t end) {
    EXPECT_EQ(begin, done);
    words.push_back(text.substr(begin, end - begin));
    done = end;
  });
  EXPECT_EQ(done, text.size());
  return words;
}

std::vector<ScanRules> all_rules() {
  std::vector<ScanRules> all = {ScanRules{}};
  for (const Words words : {Words::kCl100k, Words::kO200k}) {
    for (const Contractions c :
         {Contractions::kNone, Contractions::kAnyAsciiCase, Contractions::kAnyCase}) {
      for (const uint32_t digits : {0u, 1u, 3u}) {
        for (const bool marks : {false, true}) {
          for (const bool slash : {false, true}) all.push_back({words, c, digits, marks, slash});
        }
      }
    }
  }
  return all;
}

TEST(Scanner, EqualsItsRegularExpression) {
  std::mt19937 rng(17);
  for (const ScanRules& rules : all_rules()) {
    const std::string pattern = pattern_for_rules(rules);
    SCOPED_TRACE(pattern);
    ASSERT_TRUE(rules_for_pattern(pattern));
    const auto regex = Regex::compile(pattern, RegexDialect::kRust);
    ASSERT_TRUE(regex.ok()) << regex.status().message();
    for (int i = 0; i < 400; ++i) {
      const std::string text = random_text(rng);
      ASSERT_EQ(words_by_scanner(rules, text), words_by_regex(**regex, text)) << text;
    }
  }
}

TEST(Scanner, KnowsThePublishedPatterns) {
  const auto llama3 = rules_for_pattern(
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
      "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
      "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+");
  ASSERT_TRUE(llama3);
  EXPECT_EQ(llama3->max_digits, 3u);
  const auto gpt2 = rules_for_pattern(
      "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+");
  ASSERT_TRUE(gpt2);
  EXPECT_EQ(gpt2->words, Words::kGpt2);
  EXPECT_FALSE(rules_for_pattern("\\p{L}+|\\s+"));
}

// Expected results from Oniguruma and Rust's regex, whose syntax the patterns use.
TEST(Regex, TranslatesWhatDiffers) {
  const auto matches = [](std::string_view pattern, const std::string& text,
                          RegexDialect dialect = RegexDialect::kOniguruma) {
    const auto regex = Regex::compile(pattern, dialect);
    EXPECT_TRUE(regex.ok()) << regex.status().message();
    std::vector<std::string> found;
    if (!regex.ok()) return found;
    (*regex)->for_each_match(
        text, [&](size_t begin, size_t end) { found.push_back(text.substr(begin, end - begin)); });
    return found;
  };
  using Strings = std::vector<std::string>;
  EXPECT_EQ(matches("\\h+", "xyz 12afz"), (Strings{"12af"}));
  EXPECT_EQ(matches("[\\p{L}&&[^\\p{Han}]]+", "ab你c"), (Strings{"ab", "c"}));
  EXPECT_EQ(matches("[\\p{L}&&\\p{Han}]+", "ab你c"), (Strings{"你"}));
  EXPECT_EQ(matches("[a[bc]]+", "dabcd"), (Strings{"abc"}));
  EXPECT_EQ(matches("\\u00e9", "é"), (Strings{"é"}));
  EXPECT_EQ(matches("^b$", "a\nb\nc"), (Strings{"b"}));
  EXPECT_EQ(matches("b$", "a\nb\nc", RegexDialect::kRust), (Strings{}));
  EXPECT_EQ(matches("a\\s", "a\u180ea "), (Strings{"a "}));
  EXPECT_EQ(matches("\\w+", "e\u0301 x"), (Strings{"e\u0301", "x"}));
  EXPECT_EQ(matches("b*", "abb"), (Strings{"", "bb"}));
}

TEST(Regex, RefusesBadPatterns) {
  for (const std::string_view pattern :
       {"(", "[a", "a{2,1}", "(?<=a*)b", "\\p{Nonsense}", "\xff"}) {
    const auto regex = Regex::compile(pattern, RegexDialect::kOniguruma);
    ASSERT_FALSE(regex.ok()) << pattern;
    EXPECT_EQ(regex.status().message().find('\n'), std::string::npos);
  }
  EXPECT_FALSE(Regex::compile(std::string(100'000, 'a'), RegexDialect::kRust).ok());
}

// Exponential for a backtracking engine: the step limit must end it.
TEST(Regex, GivesUpOnHostilePatterns) {
  const auto regex = Regex::compile("(?:a+a+)+[^a]\\1?|(a|a)*b", RegexDialect::kRust);
  ASSERT_TRUE(regex.ok());
  size_t count = 0;
  (*regex)->for_each_match(std::string(60, 'a'), [&](size_t, size_t) { ++count; });
  EXPECT_EQ(count, 0u);
}

}  // namespace
}  // namespace freshet::tokenizer

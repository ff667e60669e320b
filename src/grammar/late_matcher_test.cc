#include "grammar/late_matcher.h"

#include <algorithm>
#include <optional>
#include <set>

#include <gtest/gtest.h>

namespace freshet::grammar {
namespace {

using Strings = std::vector<std::string>;

// A vocabulary of every printable byte and some longer tokens, including the special ones.
class Vocabulary {
 public:
  explicit Vocabulary(const Strings& longer, const Strings& special = {}) {
    for (char c = ' '; c <= '~'; ++c) tokens_.emplace_back(1, c);
    tokens_.emplace_back("\n");
    tokens_.insert(tokens_.end(), longer.begin(), longer.end());
    Strings plain = tokens_;
    plain.resize(tokens_.size() + special.size());
    tokens_.insert(tokens_.end(), special.begin(), special.end());
    trie_ = std::make_shared<const TokenTrie>(plain);
    thought_ = std::make_shared<const ThoughtTokens>("<think>", "</think>", tokens_);
  }

  int32_t id(const std::string& token) const {
    return static_cast<int32_t>(std::ranges::find(tokens_, token) - tokens_.begin());
  }
  LateMatcher matcher(const std::string& regex, bool inside) const {
    auto grammar = Grammar::from_regex(trie_, regex);
    EXPECT_TRUE(grammar.ok()) << grammar.status().message();
    return {*grammar, thought_, inside};
  }
  // The tokens that may come; nullopt: any token, no mask is needed.
  std::optional<std::set<std::string>> next(LateMatcher& m) const {
    std::vector<uint32_t> mask((tokens_.size() + 31) / 32);
    if (!m.fill_mask(mask)) return std::nullopt;
    std::set<std::string> allowed;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if ((mask[i / 32] >> (i % 32)) & 1) allowed.insert(tokens_[i]);
    }
    return allowed;
  }
  // Accepts tokens, each of which must be allowed.
  void take(LateMatcher& m, const Strings& tokens) const {
    for (const std::string& t : tokens) {
      const auto allowed = next(m);
      EXPECT_TRUE(!allowed || allowed->contains(t)) << t;
      m.accept(id(t));
    }
  }
  size_t size() const { return tokens_.size(); }

 private:
  Strings tokens_;
  std::shared_ptr<const TokenTrie> trie_;
  std::shared_ptr<const ThoughtTokens> thought_;
};

using Set = std::set<std::string>;

TEST(LateMatcher, HoldsFromTheFirstTokenWhereNothingIsThought) {
  const Vocabulary v({}, {"<think>", "</think>"});
  auto grammar = Grammar::from_choices(
      std::make_shared<const TokenTrie>(Strings{"a", "b", "<think>"}), {"a", "ab"});
  LateMatcher m(*grammar, nullptr, false);
  std::vector<uint32_t> mask(1);
  EXPECT_TRUE(m.fill_mask(mask));
  EXPECT_EQ(mask[0], 1U);
  m.accept(0);
  EXPECT_TRUE(m.can_end());
}

TEST(LateMatcher, IsIdleUntilTheEndOfAThoughtThatThePromptOpened) {
  const Vocabulary v({"\n\n"}, {"<think>", "</think>"});
  LateMatcher m = v.matcher("ab", true);
  for (const char* t : {"a", "b", "x", "<", "/", "<think>", "\n"}) {
    EXPECT_EQ(v.next(m), std::nullopt);
    EXPECT_FALSE(m.can_end());
    m.accept(v.id(t));
  }
  m.accept(v.id("</think>"));
  EXPECT_EQ(v.next(m), (Set{"a", " ", "\n", "\n\n"}));
  LateMatcher spaced = m;
  v.take(m, {"a"});
  EXPECT_EQ(v.next(m), Set{"b"});
  v.take(m, {"b"});
  EXPECT_TRUE(m.can_end());
  v.take(spaced, {"\n\n"});
  EXPECT_EQ(v.next(spaced), Set{"a"});  // one token of white space
  v.take(spaced, {"a", "b"});
  EXPECT_TRUE(spaced.can_end());
}

TEST(LateMatcher, AnAnswerBeginsWithAThoughtOrIsTheGrammars) {
  const Vocabulary v({"<th"}, {"<think>", "</think>"});
  LateMatcher m = v.matcher("ab|", false);
  EXPECT_TRUE(m.can_end());
  EXPECT_EQ(v.next(m), (Set{"a", "<think>"}));  // a tag that is a token is not spelled
  LateMatcher alone = m;
  v.take(alone, {"a"});
  EXPECT_EQ(v.next(alone), Set{"b"});
  v.take(m, {"<think>"});
  EXPECT_EQ(v.next(m), std::nullopt);
  EXPECT_FALSE(m.can_end());
  v.take(m, {"x", "</think>", "a", "b"});
  EXPECT_TRUE(m.can_end());
}

TEST(LateMatcher, FindsTagsThatSeveralTokensSpell) {
  const Vocabulary v({"<th", "ink", "</", "k>\n", "k>x", "think"});
  LateMatcher m = v.matcher("a<b", false);
  EXPECT_EQ(v.next(m), (Set{"a", "<", "<th"}));
  v.take(m, {"<"});
  EXPECT_EQ(v.next(m), (Set{"t", "think"}));
  v.take(m, {"t", "h", "i", "n"});
  EXPECT_EQ(v.next(m), (Set{"k", "k>\n"}));
  v.take(m, {"k>\n", "a", "<", "b", "</", "t", "h", "i", "n", "k", "x", "<", "/", "think"});
  EXPECT_EQ(v.next(m), std::nullopt);
  v.take(m, {">"});
  EXPECT_EQ(v.next(m), (Set{"a", " ", "\n"}));
  v.take(m, {"a", "<", "b"});
  EXPECT_TRUE(m.can_end());
}

// A token that ends the tag and begins the answer must begin it as the grammar requires.
TEST(LateMatcher, ATokenAcrossTheEndBeginsTheAnswer) {
  const Vocabulary v({"</think", ">\n", ">\n{", ">[", ">{\"", "</think>[", "</think>{"});
  LateMatcher m = v.matcher("\\{\"a\"\\}", true);
  const auto all_but = [&](const Set& left_out) {
    const auto allowed = v.next(m);
    ASSERT_TRUE(allowed);
    EXPECT_EQ(allowed->size(), v.size() - left_out.size());
    for (const std::string& t : left_out) EXPECT_FALSE(allowed->contains(t)) << t;
  };
  all_but({"</think>["});
  v.take(m, {"x", "</think"});
  all_but({">[", "</think>["});
  LateMatcher white = m;
  v.take(white, {">\n"});
  EXPECT_EQ(v.next(white), (Set{"{"}));
  v.take(m, {">{\""});
  EXPECT_EQ(v.next(m), (Set{"a"}));
  v.take(m, {"a", "\"", "}"});
  EXPECT_TRUE(m.can_end());
}

// Text that begins like the tag may belong to the grammar, until it is the tag.
TEST(LateMatcher, TheTagGoesBeforeTheGrammar) {
  const Vocabulary v({});
  LateMatcher answer = v.matcher("<think[>!]", false);
  LateMatcher thought = answer;
  v.take(answer, {"<", "t", "h", "i", "n", "k", "!"});
  EXPECT_TRUE(answer.can_end());
  v.take(thought, {"<", "t", "h", "i", "n", "k", ">"});
  EXPECT_FALSE(thought.can_end());
  EXPECT_EQ(v.next(thought), std::nullopt);
  v.take(thought, {"<", "/", "t", "h", "i", "n", "k", ">"});
  EXPECT_EQ(v.next(thought), (Set{"<", " ", "\n"}));
}

// A vocabulary that cannot spell the tag never begins it.
TEST(LateMatcher, NoWayThatLeadsNowhere) {
  const Strings tokens = {"a", "<", "<thi", "think", "k>"};
  auto grammar = Grammar::from_choices(std::make_shared<const TokenTrie>(tokens), {"a"});
  LateMatcher m(*grammar, std::make_shared<const ThoughtTokens>("<think>", "</think>", tokens),
                false);
  std::vector<uint32_t> mask(1);
  EXPECT_TRUE(m.fill_mask(mask));
  EXPECT_EQ(mask[0], 1U);
}

// After a rollback by any number of tokens, a matcher has its earlier state and continues
// identically.
TEST(LateMatcher, RollsBackAcrossTheThought) {
  const Vocabulary v({"<th", "ink", "</", "k>\n", "think", "\n\n"});
  struct Case {
    const char* regex;
    bool inside;
    Strings tokens;
  };
  const std::vector<Case> cases = {
      {"<tab", false, {"<", "t", "a", "b"}},  // begins like the tag
      {"<tab", false, {"<", "t", "h", "ink", ">", "x", "</", "think", ">", " ", "<", "t", "a"}},
      {"a<b", false, {"<th", "i", "n", "k>\n", "</", "t", "h", "i", "n", "k>\n", "a", "<", "b"}},
      {"ab", true, {"x", "<", "/", "think", ">", "\n\n", "a", "b"}},
      {"ab", true, {"</", "think", ">", "a", "b"}},
  };
  for (const Case& c : cases) {
    std::vector<LateMatcher> before = {v.matcher(c.regex, c.inside)};
    for (const std::string& t : c.tokens) {
      before.push_back(before.back());
      v.take(before.back(), {t});
    }
    for (size_t from = 0; from < before.size(); ++from) {
      for (size_t to = 0; to <= from; ++to) {
        LateMatcher m = before[from];
        m.rollback(static_cast<int>(from - to));
        for (size_t i = to; i < before.size(); ++i) {
          EXPECT_EQ(v.next(m), v.next(before[i]))
              << c.regex << " " << from << " " << to << " " << i;
          EXPECT_EQ(m.can_end(), before[i].can_end());
          if (i < c.tokens.size()) m.accept(v.id(c.tokens[i]));
        }
      }
    }
  }
}

TEST(LateMatcher, RollsBackAsFarAsItSays) {
  const Vocabulary v({});
  LateMatcher m = v.matcher("a{300}", true);
  v.take(m, {"<", "/", "t", "h", "i", "n", "k", ">"});
  for (int i = 0; i < 200; ++i) m.accept(v.id("a"));
  m.rollback(LateMatcher::kMostRollback);
  for (int i = 0; i < 100 + LateMatcher::kMostRollback; ++i) {
    EXPECT_FALSE(m.can_end());
    v.take(m, {"a"});
  }
  EXPECT_TRUE(m.can_end());
}

}  // namespace
}  // namespace freshet::grammar

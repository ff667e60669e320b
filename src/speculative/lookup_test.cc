// Drafters that look texts up: n-grams and suffixes, against a search by hand.
#include <algorithm>
#include <random>

#include <gtest/gtest.h>

#include "speculative/config.h"
#include "speculative/registry.h"
#include "speculative/suffix_index.h"

namespace freshet::speculative {
namespace {

using Ids = std::vector<int32_t>;

Config config_of(std::string_view text) {
  auto config = parse_config(text);
  FRESHET_CHECK(config.ok(), "{}", config.status().message());
  return std::move(*config);
}

Ids propose(Drafter& drafter, const Ids& tokens, int limit, uint64_t sequence = 1,
            uint64_t owner = 0) {
  DraftRequest r{.sequence = sequence, .tokens = tokens, .limit = limit, .owner = owner};
  drafter.propose({&r, 1});
  return r.draft;
}

// The last occurrence of the longest end of `tokens`, by looking at every place.
Ids slow_ngram(const Ids& tokens, size_t min, size_t max, size_t limit) {
  for (size_t n = std::min(max, tokens.size()); n >= min; --n) {
    for (size_t end = tokens.size() - 1; end >= n; --end) {
      if (!std::equal(tokens.end() - static_cast<ptrdiff_t>(n), tokens.end(),
                      tokens.begin() + static_cast<ptrdiff_t>(end - n)))
        continue;
      Ids draft = tokens;
      for (size_t i = 0; i < limit; ++i) draft.push_back(draft[end + i]);
      return Ids(draft.begin() + std::ssize(tokens), draft.end());
    }
  }
  return {};
}

TEST(Ngram, SyntheticDraftsNeedNoMatch) {
  const Ids tokens = {5, 6, 7, 8};
  EXPECT_EQ(propose(*ngram_drafter(config_of(R"({"method": "ngram"})")), tokens, 2), Ids());
  const auto synthetic = ngram_drafter(config_of(R"({"method": "ngram",
      "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3})"));
  EXPECT_EQ(propose(*synthetic, tokens, 2), (Ids{6, 7}));
}

TEST(Ngram, FindsWhatASearchFinds) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int words = 2 + round % 7;
    const size_t min = 1 + static_cast<size_t>(round % 3),
                 max = min + static_cast<size_t>(round % 4);
    const auto drafter = ngram_drafter(config_of(fmt::format(
        R"({{"method": "ngram", "prompt_lookup_min": {}, "prompt_lookup_max": {}}})", min, max)));
    Ids tokens;
    for (int i = 0; i < 12; ++i) tokens.push_back(static_cast<int32_t>(random()) % words);
    for (int i = 0; i < 40; ++i) {
      tokens.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(words)));
      ASSERT_EQ(propose(*drafter, tokens, 6), slow_ngram(tokens, min, max, 6)) << round << " " << i;
    }
  }
}

TEST(SuffixIndex, FollowsTheLongestContextAndTheCommonestContinuation) {
  SuffixIndex index;
  index.append(Ids{1, 2, 3, 4, 5, 9, 2, 3, 7, 9, 2, 3, 7, 8});
  const SuffixIndex::Limits limits{.factor = 4.0, .most = 3};
  // 7 follows twice in three times; then 9 and 8 share, and the latest wins.
  EXPECT_EQ(index.guess(Ids{0, 2, 3}, limits).tokens, (Ids{7, 8}));
  EXPECT_EQ(index.guess(Ids{0, 2, 3}, {.factor = 4.0, .min_share = 0.4, .most = 3}).tokens,
            (Ids{7}));
  EXPECT_EQ(index.guess(Ids{1, 2, 3}, limits).tokens, (Ids{4, 5, 9}));
  EXPECT_EQ(index.guess(Ids{5, 9}, {.factor = 1.0, .most = 9}).tokens, (Ids{2, 3}));
  EXPECT_TRUE(index.guess(Ids{7, 7}, limits).tokens.empty());
  EXPECT_TRUE(index.guess(Ids{3}, limits).tokens.empty());
}

// A sequence's own text ends with the tail, which is no occurrence of it.
TEST(SuffixIndex, FindsTheTailEarlierInTheSameText) {
  SuffixIndex index;
  const std::vector<int32_t> text = {1, 2, 3, 4, 5, 6, 9, 2, 3};
  index.append(text);
  EXPECT_EQ(index.guess(text, {.depth = 24, .factor = 2.0, .most = 3}).tokens,
            (std::vector<int32_t>{4, 5, 6}));
  index.append(std::vector<int32_t>{7});
  const std::vector<int32_t> other = {3, 7};
  EXPECT_TRUE(index.guess(other, {.most = 3}).tokens.empty());
}

TEST(SuffixIndex, ForgetsTextsAndCrossesNoBorder) {
  SuffixIndex index;
  index.append(Ids{1, 2, 3});
  index.end_text();
  index.append(Ids{1, 2, 4, 5});
  index.end_text();
  const SuffixIndex::Limits limits{.factor = 4.0, .min_share = 0.0, .most = 5};
  EXPECT_EQ(index.guess(Ids{2, 3}, limits).tokens, Ids{});
  EXPECT_EQ(index.guess(Ids{9, 1, 2}, limits).tokens, (Ids{4, 5}));
  index.forget_oldest_text();
  EXPECT_EQ(index.texts(), 1u);
  EXPECT_EQ(index.guess(Ids{1, 2}, limits).tokens, (Ids{4, 5}));
  index.forget_oldest_text();
  EXPECT_TRUE(index.guess(Ids{1, 2}, limits).tokens.empty());
}

TEST(Suffix, KeepsEachOwnersTextsApart) {
  const auto drafter = suffix_drafter(config_of(R"({"method": "suffix",
      "suffix_decoding_max_spec_factor": 8, "suffix_decoding_max_cached_requests": 2})"));
  const auto answer = [&](uint64_t sequence, uint64_t owner, const Ids& output) {
    Ids tokens = {50, 51};
    for (const int32_t id : output) {
      tokens.push_back(id);
      propose(*drafter, tokens, 4, sequence, owner);
    }
    drafter->forget(sequence);
  };
  answer(1, 7, {20, 21, 22, 23});
  EXPECT_EQ(propose(*drafter, {60, 20, 21}, 4, 2, 7), (Ids{22, 23}));
  EXPECT_EQ(propose(*drafter, {60, 20, 21}, 4, 3, 8), Ids{});
  answer(4, 8, {30, 31, 32});
  answer(5, 8, {40, 41, 42});  // the oldest text goes
  EXPECT_EQ(propose(*drafter, {61, 20, 21}, 4, 6, 7), Ids{});
  EXPECT_EQ(propose(*drafter, {61, 30, 31}, 4, 7, 8), (Ids{32}));
}

TEST(Config, TakesTheKeysOfVllm) {
  const Config c = config_of(R"({"method": "ngram", "num_speculative_tokens": 4,
      "prompt_lookup_max": 7, "prompt_lookup_min": 3})");
  EXPECT_EQ(c.limit(), 4);
  EXPECT_EQ(c.prompt_lookup_max, 7);
  EXPECT_EQ(c.prompt_lookup_min, 3);
  EXPECT_EQ(config_of(R"({"prompt_lookup_max": 3})").method, "ngram");
  const Config tree = config_of(R"({"method": "medusa", "model": "m", "num_speculative_tokens": 7,
      "speculative_token_tree": "[(0,), (0, 0), (1,)]", "tree_max_batch": 2})");
  EXPECT_EQ(tree.tree.shape, *parse_tree("[(0,), (1,), (0, 0)]"));
  EXPECT_EQ(tree.tree.max_batch, 2);
  const Config rated = config_of(R"({"method": "medusa", "model": "m", "tree_nodes": 6,
      "num_speculative_tokens": 2, "tree_acceptance_rates": [0.6, 0.2]})");
  EXPECT_EQ(rated.tree.shape.nodes.size(), 6u);  // 2 * 2 + 2: full at two levels
  EXPECT_EQ(rated.tree.shape.depth(), 2);
  EXPECT_FALSE(c.tree.wanted());
  const auto wrong = parse_config(R"({"method": "ngram", "draft_modle": 1})");
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.status().message().find("draft_modle"), std::string::npos);
}

}  // namespace
}  // namespace freshet::speculative

// Policies against plain formulas in double, as the papers write them; schedules; hostile JSON.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "kv_cache/block_cache.h"
#include "kv_cache/retention/schedule.h"

namespace freshet::kv_cache {
namespace {

constexpr int kHeads = 3, kSlots = 90, kDim = 8;

// Scores and keys of a layer, drawn at random.
struct Layer {
  std::vector<int64_t> sums;
  std::vector<float> keys;  // [heads, slots, dim]

  explicit Layer(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < kHeads * kSlots; ++i) sums.push_back(random() >> 4);
    for (int i = 0; i < kHeads * kSlots * kDim; ++i) keys.push_back(normal(random) + 0.5f);
  }
  double score(int h, int i) const { return static_cast<double>(sums[size_t(h * kSlots + i)]); }
  double key(int h, int i, int d) const { return keys[size_t((h * kSlots + i) * kDim + d)]; }
  double cosine(int h, int i, int j) const {
    double a = 0, b = 0, c = 0;
    for (int d = 0; d < kDim; ++d) {
      a += key(h, i, d) * key(h, i, d);
      b += key(h, j, d) * key(h, j, d);
      c += key(h, i, d) * key(h, j, d);
    }
    return c / std::sqrt(a * b);
  }
  std::vector<int32_t> kept(const RetentionPolicy& policy, int head, int32_t count) const {
    const auto read = [&](int h, float* to) {
      std::copy_n(keys.begin() + h * kSlots * kDim, kSlots * kDim, to);
    };
    const StoredKeys stored{kHeads, kSlots, kDim, sums.data(), kSlots, read};
    std::vector<int32_t> out(static_cast<size_t>(count));
    policy.keep(stored, head, out);
    return out;
  }
};

// The `count` best slots of [from, to), with the pinned ones around them.
std::vector<int32_t> best(const std::vector<double>& scores, int from, int to, int count) {
  std::vector<int32_t> order(static_cast<size_t>(to - from));
  std::iota(order.begin(), order.end(), from);
  std::ranges::stable_sort(order,
                           [&](int a, int b) { return scores[size_t(a)] > scores[size_t(b)]; });
  order.resize(static_cast<size_t>(count - from - (kSlots - to)));
  for (int i = 0; i < from; ++i) order.push_back(i);
  for (int i = to; i < kSlots; ++i) order.push_back(i);
  std::ranges::sort(order);
  return order;
}

Retention policy(const char* json) {
  auto made = make_retention(json);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return *made;
}

TEST(Retention, SnapKvAveragesNeighboursOfTheWindowsWeights) {
  const auto p =
      policy(R"({"policy": "snapkv", "budget": 40, "window": 10, "kernel": 5, "sinks": 2})");
  for (uint32_t seed = 0; seed < 4; ++seed) {
    const Layer layer(seed);
    for (int h = 0; h < kHeads; ++h) {
      std::vector<double> pooled(kSlots);
      for (int i = 0; i < kSlots - 10; ++i) {
        for (int j = i - 2; j <= i + 2; ++j)
          if (j >= 0 && j < kSlots - 10) pooled[size_t(i)] += layer.score(h, j) / 5;
      }
      EXPECT_EQ(layer.kept(*p, h, 40), best(pooled, 2, kSlots - 10, 40));
    }
  }
}

TEST(Retention, PyramidKvBudgetsFallByLayer) {
  const auto p = policy(R"({"policy": "pyramidkv", "budget": 1032, "window": 32, "beta": 20})");
  int64_t sum = 0;
  for (int l = 0; l < 32; ++l) {
    const double least = 1000.0 / 20, most = 2000.0 - least;
    EXPECT_EQ(p->budget(l, 32), 32 + int(most - l * (most - least) / 31)) << l;
    sum += p->budget(l, 32);
  }
  EXPECT_NEAR(double(sum) / 32, 1032, 1);
  const auto q = policy(R"({"policy": "pyramidkv", "budget": 1032, "window": 32, "decay": 0.9})");
  sum = 0;
  for (int l = 0; l < 32; ++l) {
    sum += q->budget(l, 32);
    if (l == 0) continue;
    EXPECT_NEAR((q->budget(l, 32) - 32) / double(q->budget(l - 1, 32) - 32), 0.9, 0.01);
  }
  EXPECT_NEAR(double(sum) / 32, 1032, 1);
}

TEST(Retention, H2oKeepsHeavyAndRecentTokens) {
  const auto p = policy(R"({"policy": "h2o", "budget": 40, "recent": 15})");
  const Layer layer(7);
  for (int h = 0; h < kHeads; ++h) {
    std::vector<double> scores(kSlots);
    for (int i = 0; i < kSlots; ++i) scores[size_t(i)] = layer.score(h, i);
    EXPECT_EQ(layer.kept(*p, h, 40), best(scores, 0, kSlots - 15, 40));
  }
}

TEST(Retention, TovaKeepsTheSameTokensInAllHeads) {
  const auto p = policy(R"({"policy": "tova", "budget": 40})");
  const Layer layer(8);
  std::vector<double> mean(kSlots);
  for (int i = 0; i < kSlots; ++i) {
    for (int h = 0; h < kHeads; ++h) mean[size_t(i)] += layer.score(h, i) / kHeads;
  }
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(layer.kept(*p, h, 40), best(mean, 0, kSlots - 1, 40));
  }
}

TEST(Retention, KeyDiffKeepsKeysUnlikeTheMean) {
  const auto p = policy(R"({"policy": "keydiff", "budget": 40})");
  const Layer layer(9);
  for (int h = 0; h < kHeads; ++h) {
    std::vector<double> mean(kDim), scores(kSlots);
    for (int i = 0; i < kSlots; ++i) {
      double norm = 0;
      for (int d = 0; d < kDim; ++d) norm += layer.key(h, i, d) * layer.key(h, i, d);
      for (int d = 0; d < kDim; ++d)
        mean[size_t(d)] += layer.key(h, i, d) / std::sqrt(norm) / kSlots;
    }
    for (int i = 0; i < kSlots; ++i) {
      double a = 0, b = 0, c = 0;
      for (int d = 0; d < kDim; ++d) {
        a += layer.key(h, i, d) * layer.key(h, i, d);
        b += mean[size_t(d)] * mean[size_t(d)];
        c += layer.key(h, i, d) * mean[size_t(d)];
      }
      scores[size_t(i)] = -c / std::sqrt(a * b);
    }
    EXPECT_EQ(layer.kept(*p, h, 40), best(scores, 0, kSlots, 40));
  }
}

TEST(Retention, RkvWeighsImportanceAgainstRedundancy) {
  const auto p =
      policy(R"({"policy": "rkv", "budget": 40, "window": 8, "kernel": 7, "lambda": 0.3})");
  const Layer layer(10);
  for (int h = 0; h < kHeads; ++h) {
    double total = 0;
    for (int i = 0; i < kSlots; ++i) total += layer.score(h, i);
    std::vector<double> redundant(kSlots), scores(kSlots);
    for (int j = 0; j < kSlots; ++j) {
      int newest = -1;
      for (int i = 0; i < kSlots; ++i)
        if (i != j && layer.cosine(h, j, i) > 0.5) newest = i;
      for (int i = 0; i < kSlots; ++i)
        if (i != j && i != newest) redundant[size_t(i)] += layer.cosine(h, j, i) / kSlots;
    }
    double sum = 0;
    for (const double r : redundant) sum += std::exp(r);
    for (int i = 0; i < kSlots; ++i) {
      double pooled = 0;
      for (int j = std::max(0, i - 3); j <= std::min(kSlots - 1, i + 3); ++j)
        pooled = std::max(pooled, layer.score(h, j) / total);
      scores[size_t(i)] = 0.3 * pooled - 0.7 * std::exp(redundant[size_t(i)]) / sum;
    }
    EXPECT_EQ(layer.kept(*p, h, 40), best(scores, 0, kSlots - 8, 40));
  }
}

TEST(Retention, StreamingKeepsSinksAndTheNewest) {
  const auto p = policy(R"({"policy": "streaming", "budget": 20, "sinks": 3})");
  std::vector<int32_t> expected = {0, 1, 2};
  for (int i = kSlots - 17; i < kSlots; ++i) expected.push_back(i);
  EXPECT_EQ(Layer(1).kept(*p, 0, 20), expected);
}

TEST(Retention, EqualScoresKeepTheLowerSlot) {
  Layer layer(1);
  std::ranges::fill(layer.sums, 5);
  std::vector<int32_t> expected(39);
  std::iota(expected.begin(), expected.end(), 0);
  expected.push_back(kSlots - 1);
  EXPECT_EQ(layer.kept(*policy(R"({"policy": "tova", "budget": 40})"), 0, 40), expected);
}

TEST(Retention, SchedulesFollowFromThePromptAlone) {
  EvictionSchedule s{{.interval = 0, .in_prompt = false, .window = 8, .accumulates = false},
                     {30, 0}};
  EXPECT_EQ(s.next(100, 0, {}), 100);
  EXPECT_EQ(s.scored_from(100, 100), 92);
  EXPECT_EQ(s.next(30, 0, {}), kNeverEvicts) << "the prompt is within the budget";
  const std::vector<int32_t> evicted = {70, 0};
  EXPECT_EQ(s.next(100, 100, evicted), kNeverEvicts);
  EXPECT_EQ(s.most_slots(0, 100, 140, false), 100);
  EXPECT_EQ(s.most_slots(0, 100, 140, true), 70);
  EXPECT_EQ(s.most_slots(1, 100, 140, true), 140);
  s.rules.interval = 16;
  EXPECT_EQ(s.next(100, 100, evicted), 116);
  EXPECT_EQ(s.next(20, 0, {}), 36) << "20 + 16 is the first multiple beyond the budget";
  EXPECT_EQ(s.most_slots(0, 100, 500, true), 46);
  s.rules.accumulates = true;
  EXPECT_EQ(s.scored_from(100, 116), 92);
  s.rules.in_prompt = true;
  EXPECT_EQ(s.next(100, 0, {}), 32);
  EXPECT_EQ(s.next(100, 32, std::vector<int32_t>{2, 0}), 48);
  EXPECT_EQ(s.most_slots(0, 100, 500, false), 46);
}

TEST(Retention, RefusesWhatItDoesNotKnow) {
  const auto error = [](const char* json) { return make_retention(json).status().message(); };
  EXPECT_EQ(*make_retention(R"({"policy": "none"})"), nullptr);
  for (const char* hostile : {"", "[]", "1", "{", "null", "{\"policy\"", R"({"policy": 3})",
                              R"({})", R"({"policy": "none", "budget": 3})"}) {
    EXPECT_FALSE(make_retention(hostile).ok()) << hostile;
  }
  EXPECT_EQ(error(R"({"policy": "fifo"})"),
            "kv_eviction: unknown policy \"fifo\"; known: none streaming snapkv pyramidkv h2o tova "
            "rkv keydiff mikv");
  EXPECT_EQ(error(R"({"policy": "tova", "budget": 64, "kernel": 3})"),
            "kv_eviction: tova has no \"kernel\"; it has budget sinks interval");
  EXPECT_EQ(error(R"({"policy": "snapkv"})"), "kv_eviction: \"budget\" is missing");
  EXPECT_EQ(error(R"({"policy": "snapkv", "budget": 16})"),
            "kv_eviction: 16 tokens are always kept, so \"budget\" must be 17 or more, not 16");
  for (const char* value : {"-1", "1e99", "3.5", "\"64\"", "null", "[64]", "99999999999", "true"}) {
    EXPECT_EQ(error(fmt::format(R"({{"policy": "tova", "budget": {}}})", value).c_str()),
              "kv_eviction: \"budget\" must be a whole number from 16 to 16777216")
        << value;
  }
  EXPECT_FALSE(make_retention(R"({"policy": "rkv", "budget": 64, "lambda": 2})").ok());
  EXPECT_FALSE(make_retention(R"({"policy": "pyramidkv", "budget": 64, "decay": 0})").ok());
}

// A computed prompt of 100 tokens in two groups of `blocks` blocks.
struct Prompt {
  explicit Prompt(int32_t blocks) : cache(options(blocks)), tokens(100) {
    std::iota(tokens.begin(), tokens.end(), 0);
    EXPECT_EQ(cache.begin(table, "", tokens, copies), 0);
    EXPECT_TRUE(cache.reserve(table, 0, 100, copies));
    cache.computed(table, tokens, 100);
  }
  static BlockCache::Options options(int32_t blocks) {
    BlockCache::Options o;
    o.groups = {{0, blocks}, {0, blocks}};
    return o;
  }

  BlockCache cache;
  std::vector<int32_t> tokens;
  std::vector<BlockCopy> copies;
  BlockTable table;
};

TEST(Retention, CompactionLeavesTheTreeAndDropsTheRest) {
  Prompt p(12);
  BlockCache& cache = p.cache;
  BlockTable& table = p.table;
  std::vector<int32_t>& tokens = p.tokens;
  std::vector<BlockCopy>& copies = p.copies;
  std::vector<std::vector<int32_t>> before;
  const std::vector<int32_t> kept = {40, 0};
  ASSERT_TRUE(cache.compact(table, 100, kept, before));
  EXPECT_EQ(before[0].size(), 7u);
  EXPECT_TRUE(before[1].empty());
  EXPECT_EQ(table.blocks(0), 3);
  EXPECT_EQ(table.slots(0, 100), 40);
  EXPECT_EQ(table.slots(1, 100), 100);
  const BlockTable* tables[] = {&table};
  EXPECT_TRUE(cache.check(tables).ok()) << cache.check(tables).message();
  EXPECT_EQ(cache.cached("", tokens), 96) << "the prompt's blocks stay in the tree";
  ASSERT_TRUE(cache.reserve(table, 100, 120, copies));
  EXPECT_EQ(table.blocks(0), 4);
  EXPECT_EQ(table.blocks(1), 8);
  tokens.resize(120, 7);
  cache.computed(table, tokens, 120);
  EXPECT_EQ(cache.cached("", tokens), 96) << "nothing behind the eviction enters it";

  BlockTable twin = cache.fork(table, 120);
  ASSERT_TRUE(cache.reserve(twin, 120, 121, copies));
  EXPECT_EQ(copies.size(), 2u) << "half-full blocks are copied on write";
  const BlockTable* both[] = {&table, &twin};
  EXPECT_TRUE(cache.check(both).ok()) << cache.check(both).message();
  cache.release(twin);
  cache.release(table);
  EXPECT_TRUE(cache.check({}).ok());
  EXPECT_EQ(cache.available(0), 12);
}

// What is dropped goes to whole blocks of the same pool, of which each holds 3 x 16 tokens.
TEST(Retention, CompactionKeepsTheRestInFewerBlocks) {
  Prompt p(16);
  BlockCache& cache = p.cache;
  BlockTable& table = p.table;
  std::vector<int32_t>& tokens = p.tokens;
  std::vector<BlockCopy>& copies = p.copies;
  std::vector<std::vector<int32_t>> before;
  const std::vector<int32_t> kept = {40, 0}, parts = {3, 0};
  ASSERT_TRUE(cache.compact(table, 100, kept, before, parts));
  EXPECT_EQ(table.blocks(0), 3);
  EXPECT_EQ(table.coarse_slots(0), 60);
  EXPECT_EQ(table.coarse[0].size(), 2u);
  EXPECT_TRUE(table.coarse[1].empty());
  EXPECT_EQ(table.coarse_slots(1), 0);
  const BlockTable* tables[] = {&table};
  EXPECT_TRUE(cache.check(tables).ok()) << cache.check(tables).message();
  EXPECT_EQ(cache.cached("", tokens), 96) << "the prompt's blocks stay in the tree";

  // A twin's next eviction takes the place of the block that is not full, and shares the full one.
  BlockTable twin = cache.fork(table, 100);
  ASSERT_TRUE(cache.reserve(twin, 100, 120, copies));
  ASSERT_TRUE(cache.compact(twin, 120, kept, before, parts));
  EXPECT_EQ(twin.coarse_slots(0), 80);
  ASSERT_EQ(twin.coarse[0].size(), 2u);
  EXPECT_EQ(twin.coarse[0][0], table.coarse[0][0]);
  EXPECT_NE(twin.coarse[0][1], table.coarse[0][1]);
  const BlockTable* both[] = {&table, &twin};
  EXPECT_TRUE(cache.check(both).ok()) << cache.check(both).message();
  cache.release(table);
  const std::vector<int32_t> held = twin.coarse[0];
  ASSERT_TRUE(cache.reserve(twin, 120, 140, copies));
  ASSERT_TRUE(cache.compact(twin, 140, kept, before, parts));
  EXPECT_EQ(twin.coarse[0].size(), 3u);
  EXPECT_TRUE(std::equal(held.begin(), held.end(), twin.coarse[0].begin())) << "nobody else has it";
  cache.release(twin);
  EXPECT_TRUE(cache.check({}).ok());
  EXPECT_EQ(cache.available(0), 16);
}

// All or nothing: another sequence has the blocks that are missing.
TEST(Retention, CompactionNeedsRoomForCoarseTokens) {
  BlockCache::Options o;
  o.groups = {{0, 8}};
  o.share_prefixes = false;
  BlockCache cache(std::move(o));
  const std::vector<int32_t> tokens(64, 1);
  std::vector<BlockCopy> copies;
  BlockTable table;
  cache.begin(table, "", tokens, copies);
  ASSERT_TRUE(cache.reserve(table, 0, 64, copies));
  BlockTable twin = cache.fork(table, 64), other = cache.fork(table, 64);
  ASSERT_TRUE(cache.reserve(other, 64, 128, copies));  // four blocks of its own
  std::vector<std::vector<int32_t>> before;
  const std::vector<int32_t> kept = {40}, parts = {3};
  EXPECT_FALSE(cache.compact(table, 64, kept, before, parts));
  EXPECT_EQ(table.blocks(0), 4);
  EXPECT_FALSE(table.evicts());
  cache.release(other);
  ASSERT_TRUE(cache.compact(table, 64, kept, before, parts)) << "three and one";
  const BlockTable* both[] = {&table, &twin};
  EXPECT_TRUE(cache.check(both).ok()) << cache.check(both).message();
  EXPECT_EQ(cache.available(0), 0);
}

}  // namespace
}  // namespace freshet::kv_cache

#include "kv_cache/block_cache.h"

#include <algorithm>
#include <memory>

#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

std::vector<int32_t> tokens_of(int length, int seed = 0) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back(i * 7 + seed * 1000);
  return tokens;
}

BlockCache::Options options_of(std::vector<GroupConfig> groups, bool share = true) {
  return {std::move(groups), share, 0};
}

// Runs all of `tokens` through the cache as one sequence, in one step.
BlockTable run(BlockCache& cache, const std::vector<int32_t>& tokens, std::string_view salt = "",
               int32_t* cached = nullptr) {
  BlockTable table;
  std::vector<BlockCopy> copies;
  const auto length = static_cast<int32_t>(tokens.size());
  const int32_t hit = cache.begin(table, salt, std::span(tokens).first(tokens.size() - 1), copies);
  if (cached != nullptr) *cached = hit;
  EXPECT_TRUE(cache.reserve(table, hit, length, copies));
  cache.computed(table, tokens, length);
  return table;
}

Status check(const BlockCache& cache, std::initializer_list<const BlockTable*> tables) {
  return cache.check(std::vector<const BlockTable*>(tables));
}

TEST(BlockCache, SharesFullBlocksAndCopiesPartOfOne) {
  BlockCache cache(options_of({{0, 20}}));
  const std::vector<int32_t> tokens = tokens_of(40);
  BlockTable a = run(cache, tokens);
  EXPECT_EQ(a.blocks(0), 3);
  BlockTable b;
  std::vector<BlockCopy> copies;
  std::vector<int32_t> other(tokens.begin(), tokens.begin() + 25);
  other.push_back(99999);
  EXPECT_EQ(cache.begin(b, "", other, copies), 25);  // one block, and 9 tokens of the next
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(b.ids[0][0], a.ids[0][0]);
  EXPECT_EQ(copies[0].from, a.ids[0][1]);
  EXPECT_EQ(copies[0].to, b.ids[0][1]);
  EXPECT_NE(b.ids[0][1], a.ids[0][1]);
  EXPECT_TRUE(check(cache, {&a, &b}).ok());
  cache.release(a);
  cache.release(b);
  EXPECT_TRUE(check(cache, {}).ok());
  EXPECT_EQ(cache.available(0), 20);
  EXPECT_EQ(cache.pool(0).free(), 18);  // two full blocks stay for later
}

TEST(BlockCache, SaltsNeverShare) {
  BlockCache cache(options_of({{0, 20}}));
  const std::vector<int32_t> tokens = tokens_of(48);
  int32_t cached = -1;
  BlockTable a = run(cache, tokens, "a", &cached);
  EXPECT_EQ(cached, 0);
  BlockTable b = run(cache, tokens, "b", &cached);
  EXPECT_EQ(cached, 0);
  BlockTable c = run(cache, tokens, "a", &cached);
  EXPECT_EQ(cached, 47);
  EXPECT_TRUE(check(cache, {&a, &b, &c}).ok());
}

TEST(BlockCache, EvictsTheLeastRecentlyUsedEndFirst) {
  BlockCache cache(options_of({{0, 6}}));
  BlockTable a = run(cache, tokens_of(32, 1));
  BlockTable b = run(cache, tokens_of(32, 2));
  cache.release(a);
  cache.release(b);
  EXPECT_EQ(cache.idle(0), 4);
  BlockTable c = run(cache, tokens_of(48, 3));  // two free blocks and one of a's
  int32_t cached = -1;
  BlockTable b2 = run(cache, tokens_of(32, 2), "", &cached);
  EXPECT_EQ(cached, 31);  // takes a's other block for its copy
  EXPECT_TRUE(check(cache, {&c, &b2}).ok());
  cache.release(b2);
  cache.release(c);
  cache.drop_idle();
  EXPECT_EQ(cache.pool(0).free(), 6);
}

// The opposite of LRU.
class LastReleased final : public EvictionPolicy {
 public:
  void released(int32_t block) override { remove(block); }
  void add(int32_t block) override {
    if (!contains(block)) blocks_.push_back(block);
  }
  void remove(int32_t block) override { std::erase(blocks_, block); }
  bool contains(int32_t block) const override {
    return std::ranges::find(blocks_, block) != blocks_.end();
  }
  int32_t first() const override { return blocks_.empty() ? kNoBlock : blocks_.back(); }

 private:
  std::vector<int32_t> blocks_;
};

TEST(BlockCache, EvictsInTheOrderOfItsPolicy) {
  BlockCache::Options options = options_of({{0, 6}});
  options.eviction = [](int32_t) -> std::unique_ptr<EvictionPolicy> {
    return std::make_unique<LastReleased>();
  };
  BlockCache cache(std::move(options));
  BlockTable a = run(cache, tokens_of(32, 1));
  BlockTable b = run(cache, tokens_of(32, 2));
  cache.release(a);
  cache.release(b);
  BlockTable c = run(cache, tokens_of(48, 3));  // two free blocks and one of b's
  EXPECT_EQ(cache.cached("", tokens_of(32, 1)), 32);
  EXPECT_EQ(cache.cached("", tokens_of(32, 2)), 16);
  EXPECT_TRUE(check(cache, {&c}).ok());
  cache.release(c);
}

TEST(BlockCache, ReservesAllOrNothing) {
  BlockCache cache(options_of({{0, 4}, {16, 3}}));
  BlockTable a = run(cache, tokens_of(20));
  std::vector<BlockCopy> copies;
  EXPECT_EQ(cache.fit(a, 20, 500), 48);  // the second group is the narrow one
  EXPECT_FALSE(cache.reserve(a, 20, 49, copies));
  EXPECT_EQ(a.blocks(0), 2);
  EXPECT_TRUE(cache.reserve(a, 20, 48, copies));
  EXPECT_TRUE(check(cache, {&a}).ok());
}

TEST(BlockCache, AForkCopiesWhatItWritesTo) {
  BlockCache cache(options_of({{0, 10}}));
  const std::vector<int32_t> tokens = tokens_of(20);
  BlockTable a = run(cache, tokens);
  BlockTable b = cache.fork(a, 20);
  BlockTable c = cache.fork(a, 20);
  EXPECT_EQ(a.ids, b.ids);
  std::vector<BlockCopy> copies;
  EXPECT_TRUE(cache.reserve(b, 20, 21, copies));
  EXPECT_TRUE(cache.reserve(c, 20, 21, copies));
  EXPECT_EQ(copies.size(), 2u);
  EXPECT_TRUE(cache.reserve(a, 20, 21, copies));  // the last owner writes in place
  EXPECT_EQ(copies.size(), 2u);
  EXPECT_EQ(a.ids[0][0], c.ids[0][0]);
  EXPECT_NE(a.ids[0][1], b.ids[0][1]);
  EXPECT_NE(b.ids[0][1], c.ids[0][1]);
  EXPECT_TRUE(check(cache, {&a, &b, &c}).ok());
  cache.release(a);
  cache.release(b);
  cache.release(c);
  EXPECT_EQ(cache.available(0), 10);
}

TEST(BlockCache, EqualBlocksBecomeOne) {
  BlockCache cache(options_of({{0, 10}}));
  const std::vector<int32_t> tokens = tokens_of(33);
  BlockTable a, b;
  std::vector<BlockCopy> copies;
  cache.begin(a, "", tokens, copies);
  cache.begin(b, "", tokens, copies);  // both start before either has computed anything
  EXPECT_TRUE(cache.reserve(a, 0, 33, copies));
  EXPECT_TRUE(cache.reserve(b, 0, 33, copies));
  EXPECT_EQ(cache.available(0), 4);
  cache.computed(a, tokens, 33);
  cache.computed(b, tokens, 33);
  EXPECT_EQ(cache.available(0), 6);
  EXPECT_EQ(a.ids[0][1], b.ids[0][1]);
  EXPECT_NE(a.ids[0][2], b.ids[0][2]);
  EXPECT_TRUE(check(cache, {&a, &b}).ok());
}

TEST(BlockCache, AWindowDropsOldBlocksAndStillShares) {
  BlockCache cache(options_of({{0, 60}, {20, 40}}));
  const std::vector<int32_t> tokens = tokens_of(100);
  BlockTable a = run(cache, tokens);
  // The next query is 100 and sees 81 to 100: blocks 5 and 6.
  EXPECT_EQ(a.ids[1][4], kNoBlock);
  EXPECT_NE(a.ids[1][5], kNoBlock);
  EXPECT_NE(a.ids[0][0], kNoBlock);
  int32_t cached = -1;
  BlockTable b = run(cache, tokens, "", &cached);
  EXPECT_EQ(cached, 96);  // the rest never filled a block
  cache.release(a);
  cache.release(b);
  EXPECT_TRUE(check(cache, {}).ok());

  // Someone needs room in the window's group: what slid out first goes first. A prefix whose window
  // is gone is of no use, however much is left of the other group; a longer one whose window is
  // there is.
  std::vector<BlockCopy> copies;
  BlockTable thief, c, d;
  cache.begin(thief, "thief", {}, copies);
  EXPECT_TRUE(cache.reserve(thief, 0, 37 * kBlockTokens, copies));
  EXPECT_EQ(cache.begin(c, "", std::span(tokens).first(60), copies), 0);
  EXPECT_EQ(cache.begin(d, "", tokens, copies), 96);
  EXPECT_EQ(d.ids[1][3], kNoBlock);
  EXPECT_NE(d.ids[1][4], kNoBlock);
  EXPECT_TRUE(check(cache, {&thief, &c, &d}).ok());
}

TEST(BlockCache, WithoutSharingNothingStays) {
  BlockCache cache(options_of({{0, 8}}, false));
  BlockTable a = run(cache, tokens_of(40));
  int32_t cached = -1;
  BlockTable b = run(cache, tokens_of(40), "", &cached);
  EXPECT_EQ(cached, 0);
  cache.release(a);
  cache.release(b);
  EXPECT_EQ(cache.pool(0).free(), 8);
}

TEST(BlockCache, NoticesLostReferences) {
  BlockCache cache(options_of({{0, 8}}));
  BlockTable a = run(cache, tokens_of(20));
  EXPECT_FALSE(check(cache, {}).ok());
  EXPECT_FALSE(check(cache, {&a, &a}).ok());
  EXPECT_TRUE(check(cache, {&a}).ok());
}

}  // namespace
}  // namespace freshet::kv_cache

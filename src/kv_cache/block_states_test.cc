#include <algorithm>

#include <gtest/gtest.h>

#include "kv_cache/block_cache.h"

namespace freshet::kv_cache {
namespace {

constexpr int kStates = 1;  // the group, behind one with full attention

std::vector<int32_t> text(int length, int seed = 0) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back(i * 7 + seed * 1000);
  return tokens;
}

BlockCache make_cache(int32_t slots, int32_t blocks = 40) {
  BlockCache::Options options;
  options.groups = {{.blocks = blocks}, {.blocks = slots, .kind = KvKind::kState}};
  return BlockCache(std::move(options));
}

// Runs all of `tokens` in one step that keeps states at `kept`.
BlockTable run(BlockCache& cache, const std::vector<int32_t>& tokens,
               std::initializer_list<int32_t> kept, int32_t* cached = nullptr,
               std::vector<BlockCopy>* copies = nullptr) {
  BlockTable table;
  std::vector<BlockCopy> own;
  std::vector<BlockCopy>& to = copies != nullptr ? *copies : own;
  const auto length = static_cast<int32_t>(tokens.size());
  const int32_t hit = cache.begin(table, "", std::span(tokens).first(tokens.size() - 1), to);
  if (cached != nullptr) *cached = hit;
  EXPECT_TRUE(cache.reserve(table, hit, length, to));
  for (const int32_t at : kept) EXPECT_TRUE(cache.keep_state(table, at, false));
  cache.computed(table, tokens, length);
  cache.settle(table, length);
  return table;
}

Status check(const BlockCache& cache, std::initializer_list<const BlockTable*> tables) {
  return cache.check(std::vector<const BlockTable*>(tables));
}

TEST(BlockStates, APrefixEndsAtTheDeepestCheckpoint) {
  BlockCache cache = make_cache(8);
  const std::vector<int32_t> tokens = text(100);
  BlockTable a = run(cache, tokens, {32, 64});
  EXPECT_EQ(cache.cached("", tokens), 64);
  EXPECT_EQ(cache.cached("", text(63)), 32);
  EXPECT_EQ(cache.cached("", text(31)), 0);

  int32_t hit = 0;
  std::vector<BlockCopy> copies;
  std::vector<int32_t> other = text(90);
  other.resize(120, 5);
  BlockTable b = run(cache, other, {}, &hit, &copies);
  EXPECT_EQ(hit, 64);
  EXPECT_EQ(b.junction, 80);  // five blocks are known, and only the state at four of them
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].group, kStates);
  EXPECT_EQ(copies[0].to, b.ids[kStates][0]);
  EXPECT_NE(copies[0].from, a.ids[kStates][0]);
  EXPECT_TRUE(check(cache, {&a, &b}).ok());
  cache.release(a);
  cache.release(b);
  EXPECT_EQ(cache.idle(kStates), 2);
  cache.drop_idle();
  EXPECT_EQ(cache.pool(kStates).free(), 8);
  EXPECT_EQ(cache.pool(0).free(), 40);
}

TEST(BlockStates, CheckpointsAreEvictedBeforeASequenceGoesWithoutASlot) {
  BlockCache cache = make_cache(3);
  BlockTable a = run(cache, text(40), {16, 32});
  EXPECT_EQ(cache.available(kStates), 2);
  BlockTable b = run(cache, text(20, 1), {});
  BlockTable c = run(cache, text(20, 2), {});
  EXPECT_EQ(cache.available(kStates), 0);
  EXPECT_EQ(cache.cached("", text(40)), 0);
  BlockTable d;
  std::vector<BlockCopy> copies;
  EXPECT_EQ(cache.begin(d, "", text(20, 3), copies), 0);
  EXPECT_FALSE(cache.reserve(d, 0, 20, copies));
  EXPECT_EQ(cache.fit(d, 0, 20), 0);
  EXPECT_TRUE(check(cache, {&a, &b, &c, &d}).ok());
  for (BlockTable* table : {&a, &b, &c, &d}) cache.release(*table);
}

// With a single slot the checkpoint itself becomes the working slot.
TEST(BlockStates, ASequenceTakesOverItsCheckpointWhereThereIsNoOtherSlot) {
  BlockCache cache = make_cache(2);
  BlockTable a = run(cache, text(40), {32});
  cache.release(a);
  BlockTable other = run(cache, text(10, 1), {});
  int32_t hit = 0;
  std::vector<BlockCopy> copies;
  BlockTable b = run(cache, text(40), {}, &hit, &copies);
  EXPECT_EQ(hit, 32);
  EXPECT_TRUE(copies.empty());
  EXPECT_EQ(cache.cached("", text(40)), 0);
  EXPECT_TRUE(check(cache, {&b, &other}).ok());
  cache.release(b);
  cache.release(other);
}

TEST(BlockStates, ForksShareTheStateUntilTheyRun) {
  BlockCache cache = make_cache(4);
  BlockTable a = run(cache, text(20), {});
  BlockTable b = cache.fork(a, 20);
  EXPECT_EQ(a.ids[kStates], b.ids[kStates]);
  std::vector<BlockCopy> copies;
  EXPECT_TRUE(cache.reserve(b, 20, 21, copies));
  EXPECT_TRUE(cache.reserve(a, 20, 21, copies));  // the last one writes in place
  EXPECT_NE(a.ids[kStates], b.ids[kStates]);
  EXPECT_EQ(std::ranges::count(copies, kStates, &BlockCopy::group), 1);
  EXPECT_TRUE(check(cache, {&a, &b}).ok());
  cache.release(a);
  cache.release(b);
}

TEST(BlockStates, RejectedDraftsTakeTheStateBack) {
  for (int accepted = 0; accepted <= 3; ++accepted) {
    BlockCache cache = make_cache(6);
    std::vector<int32_t> tokens = text(31);
    BlockTable a = run(cache, tokens, {});
    std::vector<BlockCopy> copies;
    // One token and three drafts: the states behind 31, 32, 33 tokens are saved, 34 is the last.
    EXPECT_FALSE(cache.reserve(a, 30, 34, copies, 6));
    ASSERT_TRUE(cache.reserve(a, 30, 34, copies, 3));
    ASSERT_EQ(a.saves.size(), 3u);
    std::vector<int32_t> slots;
    for (const SavedState& saved : a.saves) {
      EXPECT_EQ(saved.tokens, 31 + std::ssize(slots));
      slots.push_back(saved.slot);
    }
    slots.push_back(a.ids[kStates][0]);
    EXPECT_TRUE(cache.keep_state(a, 32, true));
    EXPECT_TRUE(check(cache, {&a}).ok());
    tokens.resize(34, 3);
    cache.computed(a, tokens, 31 + accepted);
    cache.settle(a, 31 + accepted);
    EXPECT_EQ(a.ids[kStates][0], slots[static_cast<size_t>(accepted)]);
    EXPECT_TRUE(a.saves.empty());
    EXPECT_EQ(cache.cached("", tokens), accepted >= 1 ? 32 : 0);
    EXPECT_TRUE(check(cache, {&a}).ok());
    cache.release(a);
    EXPECT_EQ(cache.pool(kStates).free(), accepted >= 1 ? 5 : 6);
  }
}

TEST(BlockStates, ARollingCheckpointMovesOn) {
  BlockCache cache = make_cache(4);
  std::vector<int32_t> tokens = text(200);
  BlockTable a = run(cache, text(20), {16});
  std::vector<BlockCopy> copies;
  for (int32_t at = 20; at < 100; ++at) {
    ASSERT_TRUE(cache.reserve(a, at, at + 1, copies));
    if ((at + 1) % 16 == 0) EXPECT_TRUE(cache.keep_state(a, at + 1, true));
    cache.computed(a, tokens, at + 1);
    cache.settle(a, at + 1);
    EXPECT_LE(cache.idle(kStates), 2);
  }
  EXPECT_EQ(cache.cached("", tokens), 96);
  EXPECT_EQ(cache.cached("", std::span(tokens).first(95)), 16);
  // One that another sequence has begun with stays.
  BlockTable b;
  EXPECT_EQ(cache.begin(b, "", tokens, copies), 96);
  ASSERT_TRUE(cache.reserve(a, 100, 112, copies));
  EXPECT_TRUE(cache.keep_state(a, 112, true));
  cache.computed(a, tokens, 112);
  cache.settle(a, 112);
  EXPECT_EQ(cache.cached("", tokens), 112);
  EXPECT_EQ(cache.cached("", std::span(tokens).first(111)), 96);
  EXPECT_TRUE(check(cache, {&a, &b}).ok());
  cache.release(a);
  cache.release(b);
}

// Without attention the tree's nodes hold checkpoints alone.
TEST(BlockStates, WorkAlone) {
  BlockCache::Options options;
  options.groups = {{.blocks = 5, .kind = KvKind::kState}};
  BlockCache cache(std::move(options));
  std::vector<int32_t> tokens = text(1000);
  BlockTable a;
  std::vector<BlockCopy> copies;
  EXPECT_EQ(cache.begin(a, "", tokens, copies), 0);
  ASSERT_TRUE(cache.reserve(a, 0, 1000, copies));
  EXPECT_TRUE(cache.keep_state(a, 512, false));
  EXPECT_TRUE(cache.keep_state(a, 992, false));
  cache.computed(a, tokens, 1000);
  cache.settle(a, 1000);
  cache.release(a);
  EXPECT_EQ(cache.cached("", tokens), 992);
  EXPECT_EQ(cache.cached("", std::span(tokens).first(900)), 512);
  EXPECT_TRUE(check(cache, {}).ok());
  cache.drop_idle();
  EXPECT_EQ(cache.pool(0).free(), 5);
  EXPECT_EQ(cache.cached("", tokens), 0);
}

}  // namespace
}  // namespace freshet::kv_cache

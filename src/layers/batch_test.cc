#include "layers/batch.h"

#include <algorithm>

#include <gtest/gtest.h>

namespace freshet {
namespace {

// Three sequences of 3, 1 and 2 tokens in two groups.
ForwardBatch three(std::vector<int32_t> logit_rows) {
  ForwardBatch b;
  b.token_ids = {10, 11, 12, 20, 30, 31};
  b.positions = {4, 5, 6, 0, 8, 9};
  b.query_start = {0, 3, 4, 6};
  b.context_len = {7, 1, 10};
  b.tables = {{{1, 2, 3, 4, 5, 6}, 2}, {{-1, 7, -1, 8, -1, 9}, 2}};
  b.logit_rows = std::move(logit_rows);
  return b;
}

bool take(const ForwardBatch& batch, std::vector<int> groups, ForwardBatch& to) {
  return take_logit_rows(batch, groups, to);
}

TEST(LogitRows, AreTheEndsOfTheirSequences) {
  ForwardBatch to;
  ASSERT_TRUE(take(three({1, 2, 5}), {1}, to));
  EXPECT_EQ(to.token_ids, (std::vector<int32_t>{11, 12, 31}));
  EXPECT_EQ(to.positions, (std::vector<int32_t>{5, 6, 9}));
  EXPECT_EQ(to.query_start, (std::vector<int32_t>{0, 2, 3}));
  EXPECT_EQ(to.context_len, (std::vector<int32_t>{7, 10}));
  ASSERT_EQ(to.tables.size(), 2u);
  EXPECT_EQ(to.tables[1].ids, (std::vector<int32_t>{-1, 7, -1, 9}));
  EXPECT_EQ(to.tables[1].stride, 2);
}

TEST(LogitRows, HaveTheTablesOfAllGroupsAskedFor) {
  ForwardBatch to;
  ASSERT_TRUE(take(three({2, 5}), {0, 1}, to));
  EXPECT_EQ(to.tables[0].ids, (std::vector<int32_t>{1, 2, 5, 6}));
  EXPECT_EQ(to.tables[1].ids, (std::vector<int32_t>{-1, 7, -1, 9}));
}

// Of three sequences, the last two have coarse tokens.
TEST(LogitRows, SeeWhatTheirSequencesKeepInFourBits) {
  ForwardBatch batch = three({2, 5});
  BlockTables& table = batch.tables[0];
  table.coarse_slots = {0, 40, 70};
  table.coarse_ids = {-1, -1, 3, -1, 4, 5};
  table.coarse_stride = 2;
  table.coarse_parts = 3;
  ForwardBatch to;
  ASSERT_TRUE(take(batch, {0}, to));
  const ops::CoarseTokens coarse = to.coarse(0);
  EXPECT_TRUE(std::ranges::equal(coarse.slots, std::vector<int32_t>{0, 70}));
  EXPECT_EQ(to.tables[0].coarse_ids, (std::vector<int32_t>{-1, -1, 4, 5}));
  EXPECT_EQ(coarse.stride, 2);
  EXPECT_EQ(coarse.parts, 3);
  ASSERT_TRUE(take(three({2, 5}), {0}, to));
  EXPECT_FALSE(to.coarse(0).any());
}

TEST(LogitRows, ForgetTheBatchBefore) {
  ForwardBatch to;
  ASSERT_TRUE(take(three({2, 3, 5}), {0}, to));
  ASSERT_TRUE(take(three({3}), {0}, to));
  EXPECT_EQ(to.positions, (std::vector<int32_t>{0}));
  EXPECT_EQ(to.tables[0].ids, (std::vector<int32_t>{3, 4}));
  ASSERT_TRUE(take(three({}), {0}, to));
  EXPECT_EQ(to.sequences(), 0);
  EXPECT_EQ(to.tokens(), 0);
  EXPECT_TRUE(to.tables[0].ids.empty());
}

TEST(LogitRows, AreNoBatchWhereAllAreWantedOrOneInTheMidst) {
  ForwardBatch to;
  EXPECT_FALSE(take(three({0, 1, 2, 3, 4, 5}), {0}, to));
  EXPECT_FALSE(take(three({0, 2}), {0}, to));
  EXPECT_FALSE(take(three({4}), {0}, to));
}

// Sequences of 5 tokens (all in this step) and of 9, of which the last 2 are.
TEST(KeyRanges, FollowTheKindOfGroup) {
  ForwardBatch batch;
  batch.query_start = {0, 5, 7};
  batch.context_len = {5, 9};
  batch.tables.resize(1);
  KeyView view;
  const auto ranges_of = [&](const KvGroup& kind) {
    find_key_ranges(batch, 0, kind, view);
    EXPECT_FALSE(view.cut());
    std::vector<std::pair<int, int>> pairs;
    for (const ops::KeyRange& r : view.ranges) pairs.emplace_back(r.first, r.end);
    return pairs;
  };
  using Pairs = std::vector<std::pair<int, int>>;
  EXPECT_EQ(ranges_of({}), Pairs());
  EXPECT_EQ(ranges_of({.window = 3}), Pairs());
  EXPECT_EQ(ranges_of({.chunk = 4}),
            (Pairs{{0, 1}, {0, 2}, {0, 3}, {0, 4}, {4, 5}, {4, 8}, {8, 9}}));
  EXPECT_EQ(ranges_of({.two_way = true}),
            (Pairs{{0, 5}, {0, 5}, {0, 5}, {0, 5}, {0, 5}, {0, 9}, {0, 9}}));
  EXPECT_EQ(ranges_of({.window = 2, .two_way = true}),
            (Pairs{{0, 2}, {0, 3}, {1, 4}, {2, 5}, {3, 5}, {6, 9}, {7, 9}}));
}

// A sequence of 3 tokens and one of 8, of which the last 6 are, with a stretch of 3 tokens.
TEST(KeyRanges, ReachToTheEndOfAStretch) {
  ForwardBatch batch;
  batch.query_start = {0, 3, 9};
  batch.context_len = {3, 8};
  batch.tables.resize(1);
  batch.tables[0].ids = {0, 1};
  batch.tables[0].stride = 1;
  KeyView view;
  const auto ranges_of = [&](const KvGroup& kind) {
    find_key_ranges(batch, 0, kind, view);
    std::vector<std::pair<int, int>> pairs;
    for (const ops::KeyRange& r : view.ranges) pairs.emplace_back(r.first, r.end);
    return pairs;
  };
  using Pairs = std::vector<std::pair<int, int>>;
  EXPECT_EQ(ranges_of({.spans = SpanUse::kAlso}), Pairs());
  batch.spans = {{}, {}, {}, {}, {3, 6}, {3, 6}, {3, 6}, {}, {}};
  EXPECT_EQ(ranges_of({.spans = SpanUse::kAlso}),
            (Pairs{{0, 1}, {0, 2}, {0, 3}, {0, 3}, {0, 6}, {0, 6}, {0, 6}, {0, 7}, {0, 8}}));
  EXPECT_FALSE(view.cut());
  EXPECT_EQ(ranges_of({.window = 2, .spans = SpanUse::kAlso}),
            (Pairs{{0, 1}, {0, 2}, {1, 3}, {1, 3}, {2, 6}, {3, 6}, {4, 6}, {5, 7}, {6, 8}}));
  // Where ranges fall, the batch is cut.
  batch.spans = {{0, 3}, {0, 3}, {0, 1}, {0, 8}, {0, 8}, {2, 8}, {2, 8}, {2, 4}, {2, 4}};
  ranges_of({.spans = SpanUse::kOnly});
  EXPECT_EQ(view.query_start, (std::vector<int32_t>{0, 2, 3, 7, 9}));
  EXPECT_EQ(view.context_len, (std::vector<int32_t>{3, 3, 8, 8}));
  EXPECT_EQ(view.tables, (std::vector<int32_t>{0, 0, 1, 1}));
}

// By cross-attention: a text, and a sequence whose first token stands before its picture.
TEST(KeyRanges, OfPicturesLeaveTextsOut) {
  ForwardBatch batch;
  batch.query_start = {0, 2, 5};
  batch.context_len = {2, 3};
  batch.tables.resize(1);
  batch.tables[0] = {{-1, 7}, 1, {0, 12}};
  batch.views = {{}, {}, {}, {0, 4}, {0, 4}};
  KeyView view;
  const KvGroup kind{.cross = 16, .kind = KvKind::kCross, .spans = SpanUse::kOnly};
  find_key_ranges(batch, 0, kind, view);
  EXPECT_EQ(view.tokens, (std::vector<int32_t>{2, 3, 4}));
  ASSERT_EQ(view.ranges.size(), 3u);
  EXPECT_EQ(view.ranges[0].end, 12);
  EXPECT_EQ(view.ranges[1].end, 4);
  EXPECT_EQ(view.query_start, (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(view.tables, (std::vector<int32_t>{7, 7}));
}

}  // namespace
}  // namespace freshet

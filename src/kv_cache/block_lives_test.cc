#include "kv_cache/block_lives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

using ::testing::ElementsAre;

TEST(BlockLives, TimesFromBirthToEviction) {
  BlockLives lives(1.0);
  lives.set_time(100);
  lives.born(0, 7);
  lives.born(1, 7);  // of another group
  for (const int64_t now : {110, 130, 160, 200, 250}) {
    lives.set_time(now);
    lives.used(0, 7);
  }
  lives.set_time(1000);
  lives.evicted(0, 7);
  lives.evicted(0, 7);  // is gone already
  lives.evicted(0, 8);  // was never born
  const auto ended = lives.take();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].lifetime, 900);
  EXPECT_EQ(ended[0].idle, 750);
  EXPECT_THAT(ended[0].gaps, ElementsAre(30, 40, 50));  // of the last four uses
  EXPECT_TRUE(lives.take().empty());

  lives.evicted(1, 7);
  const auto unused = lives.take();
  ASSERT_EQ(unused.size(), 1u);
  EXPECT_EQ(unused[0].idle, 900);
  EXPECT_TRUE(unused[0].gaps.empty());
}

TEST(BlockLives, ForgetsABlockThatWasFreed) {
  BlockLives lives(1.0);
  lives.born(0, 1);
  lives.used(0, 1);
  lives.set_time(50);
  lives.born(0, 1);
  lives.set_time(70);
  lives.evicted(0, 1);
  const auto ended = lives.take();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].lifetime, 20);
  EXPECT_EQ(ended[0].idle, 20);
}

TEST(BlockLives, TimesAShareOfBlocks) {
  for (const double share : {0.0, 0.01, 0.25, 1.0}) {
    BlockLives lives(share);
    for (int i = 0; i < 10'000; ++i) {
      lives.born(0, i % 16);
      lives.evicted(0, i % 16);
    }
    EXPECT_NEAR(static_cast<double>(lives.take().size()), 10'000 * share, 1.0) << share;
  }
}

}  // namespace
}  // namespace freshet::kv_cache

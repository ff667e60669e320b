#include "kv_cache/eviction_policy.h"

#include <gtest/gtest.h>

#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {
namespace {

TEST(EvictionPolicy, LruEvictsTheBlockThatWasReleasedFirst) {
  const auto lru = make_lru_policy(8);
  EXPECT_EQ(lru->first(), kNoBlock);
  for (const int32_t block : {5, 2, 7}) {
    lru->released(block);
    lru->add(block);
  }
  EXPECT_EQ(lru->first(), 5);
  lru->add(5);
  lru->remove(5);
  EXPECT_FALSE(lru->contains(5));
  EXPECT_EQ(lru->first(), 2);
  lru->add(5);  // not released again: it keeps its place
  EXPECT_EQ(lru->first(), 5);
  lru->remove(5);
  lru->released(5);
  lru->add(5);
  EXPECT_EQ(lru->first(), 2);
  lru->remove(2);
  EXPECT_EQ(lru->first(), 7);
  lru->remove(7);
  EXPECT_EQ(lru->first(), 5);
  EXPECT_TRUE(lru->contains(5));
}

}  // namespace
}  // namespace freshet::kv_cache

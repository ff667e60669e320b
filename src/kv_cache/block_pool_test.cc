#include "kv_cache/block_pool.h"

#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

TEST(BlockPool, HandsOutAndTakesBack) {
  BlockPool pool(3);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 2);
  EXPECT_EQ(pool.take(), kNoBlock);
  pool.ref(1);
  EXPECT_EQ(pool.unref(1), 1);
  EXPECT_EQ(pool.free(), 0);
  EXPECT_EQ(pool.unref(1), 0);
  EXPECT_EQ(pool.unref(0), 0);
  EXPECT_EQ(pool.take(), 0);  // last freed, first taken
  EXPECT_EQ(pool.take(), 1);
  EXPECT_TRUE(pool.check_conserved().ok());
}

TEST(BlockPoolDeathTest, MisuseIsFatal) {
  BlockPool pool(2);
  EXPECT_DEATH(pool.ref(0), "free");
  EXPECT_DEATH(pool.unref(0), "already free");
  EXPECT_DEATH((void)pool.refs(2), "block 2 of 2");
}

}  // namespace
}  // namespace freshet::kv_cache

#include "kv_cache/encoder_cache.h"

#include <gtest/gtest.h>

namespace freshet::kv_cache {
namespace {

using Blocks = std::vector<int32_t>;

TEST(EncoderCache, KeepsWhatWasReleased) {
  EncoderCache cache(6, true);
  Blocks first = cache.take("a", 2)->blocks;
  cache.keep("a", first);
  auto second = cache.take("a", 2);
  EXPECT_TRUE(second->found);
  EXPECT_EQ(second->blocks, first);
  EXPECT_EQ(cache.available(), 4);
  const Blocks held = first;
  cache.release("a", first);
  EXPECT_EQ(cache.available(), 4);
  cache.release("a", second->blocks);
  EXPECT_EQ(cache.available(), 6);
  const auto third = cache.take("a", 2);
  EXPECT_TRUE(third->found);
  EXPECT_EQ(third->blocks, held);
  EXPECT_FALSE(cache.take("b", 2)->found);
  EXPECT_EQ(cache.evictions(), 0);
}

TEST(EncoderCache, EvictsTheOldestIdleOutput) {
  EncoderCache cache(6, true);
  for (const char* key : {"a", "b", "c"}) {
    Blocks blocks = cache.take(key, 2)->blocks;
    cache.keep(key, blocks);
    cache.release(key, blocks);
  }
  Blocks a = cache.take("a", 2)->blocks;  // b is the oldest now
  cache.release("a", a);
  EXPECT_FALSE(cache.take("d", 2)->found);
  EXPECT_EQ(cache.evictions(), 1);
  EXPECT_TRUE(cache.take("a", 2)->found);
  EXPECT_TRUE(cache.take("c", 2)->found);
  // All blocks are held: one more output does not fit, but those that are there do.
  EXPECT_FALSE(cache.fits("b", 2));
  EXPECT_FALSE(cache.take("b", 2).has_value());
  EXPECT_TRUE(cache.fits("a", 2));
}

TEST(EncoderCache, KeepsNothingThatIsNotShared) {
  for (const bool share : {false, true}) {
    EncoderCache cache(4, share);
    const std::string key = share ? "" : "a";
    Blocks blocks = cache.take(key, 3)->blocks;
    cache.keep(key, blocks);
    EXPECT_FALSE(cache.fits(key, 3));
    cache.release(key, blocks);
    EXPECT_FALSE(cache.take(key, 3)->found);
  }
}

TEST(EncoderCache, CountsItsReferences) {
  EncoderCache cache(4, true);
  Blocks a = cache.take("a", 1)->blocks;
  cache.keep("a", a);
  EXPECT_TRUE(cache.check(Blocks{1, 0, 0, 0}).ok());
  EXPECT_FALSE(cache.check(Blocks{0, 0, 0, 0}).ok());
  EXPECT_FALSE(cache.check(Blocks{1, 1, 0, 0}).ok());
  cache.release("a", a);
  EXPECT_TRUE(cache.check(Blocks{0, 0, 0, 0}).ok());
}

}  // namespace
}  // namespace freshet::kv_cache

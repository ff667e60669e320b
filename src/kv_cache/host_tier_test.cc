#include "kv_cache/host_tier.h"

#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {
namespace {

BlockKey key_of(uint64_t i) {
  return {i * 0x9E3779B97F4A7C15, i};
}

int32_t put(HostTier& tier, uint64_t i, int group = 0) {
  const int32_t slot = tier.take(key_of(i), group);
  if (slot == kNoBlock) return slot;
  tier.complete(group, slot);
  tier.drop(group, slot);
  return slot;
}

TEST(HostTier, EvictsTheLeastRecentlyUsed) {
  auto tier = HostTier::create(3 * 64, {64}, "lru");
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ(tier->slots(), 3);
  for (uint64_t i = 1; i <= 3; ++i) put(*tier, i);
  tier->touch(key_of(1), 0);
  put(*tier, 4);
  EXPECT_TRUE(tier->contains(key_of(1), 0));
  EXPECT_FALSE(tier->contains(key_of(2), 0));
  EXPECT_TRUE(tier->check().ok());
}

TEST(HostTier, NeverEvictsWhatIsHeld) {
  auto tier = HostTier::create(2 * 64, {64}, "arc");
  ASSERT_TRUE(tier.ok());
  const int32_t a = tier->take(key_of(1), 0);
  const int32_t b = tier->take(key_of(2), 0);
  EXPECT_EQ(tier->take(key_of(3), 0), kNoBlock);
  EXPECT_EQ(tier->find(key_of(1), 0), kNoBlock) << "its bytes are not there yet";
  tier->complete(0, a);
  tier->drop(0, a);
  EXPECT_EQ(tier->find(key_of(1), 0), a);
  EXPECT_EQ(tier->take(key_of(3), 0), a);
  tier->drop(0, b);  // not complete: given up
  EXPECT_FALSE(tier->contains(key_of(2), 0));
  EXPECT_TRUE(tier->check().ok());
}

TEST(HostTier, RefusesTooLittleMemoryAndUnknownPolicies) {
  EXPECT_FALSE(HostTier::create(63, {64}, "lru").ok());
  EXPECT_EQ(HostTier::create(640, {64}, "fifo").status().message(),
            "eviction_policy 'fifo': must be lru or arc");
}

// A scan of blocks that are used once does not drive out those that are used again and again: the
// point of ARC.
TEST(HostTier, ArcSurvivesAScan) {
  const auto hits = [](const char* policy) {
    auto tier = HostTier::create(20 * 64, {64}, policy);
    int found = 0;
    const auto use = [&](uint64_t i) {
      const bool there = tier->contains(key_of(i), 0);
      if (there) {
        tier->touch(key_of(i), 0);
      } else {
        put(*tier, i);
      }
      return there;
    };
    uint64_t scan = 1000;
    for (int round = 0; round < 50; ++round) {
      for (uint64_t i = 1; i <= 10; ++i) found += use(i);
      for (uint64_t i = 1; i <= 10; ++i) use(i);
      for (int i = 0; i < 30; ++i) use(scan++);
    }
    EXPECT_TRUE(tier->check().ok());
    return found;
  };
  EXPECT_EQ(hits("lru"), 0);
  EXPECT_GT(hits("arc"), 400);
}

TEST(HostTier, BooksHoldUnderRandomUse) {
  for (const char* policy : {"lru", "arc"}) {
    std::mt19937 random(7);
    auto tier = HostTier::create(12 * 96, {64, 32}, policy);
    ASSERT_TRUE(tier.ok());
    std::vector<std::pair<int, int32_t>> held;
    for (int i = 0; i < 20'000; ++i) {
      const uint64_t k = random() % 40;
      const int group = static_cast<int>(random() % 2);
      switch (random() % 4) {
        case 0:
          if (tier->contains(key_of(k), group)) break;
          if (const int32_t slot = tier->take(key_of(k), group); slot != kNoBlock) {
            if (random() % 4 > 0) tier->complete(group, slot);
            held.emplace_back(group, slot);
          }
          break;
        case 1:
          if (held.empty()) break;
          tier->drop(held.back().first, held.back().second);
          held.pop_back();
          break;
        case 2:
          tier->touch(key_of(k), group);
          break;
        case 3:
          if (const int32_t slot = tier->find(key_of(k), group);
              slot != kNoBlock && held.size() < 8) {
            tier->hold(group, slot);
            held.emplace_back(group, slot);
          }
          break;
      }
      const Status books = tier->check();
      ASSERT_TRUE(books.ok()) << books.message();
    }
  }
}

}  // namespace
}  // namespace freshet::kv_cache

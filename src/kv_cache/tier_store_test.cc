#include "kv_cache/tier_store.h"

#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {
namespace {

namespace fs = std::filesystem;

class TierStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              fmt::format("freshet_store_{}_{}", ::getpid(),
                          ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    ops::KvShape shape;
    shape.kv_heads = 2;
    shape.key_dim = shape.value_dim = 8;
    spec_.layers.assign(3, {shape});
    spec_.groups = {{0, {0, 2}}, {64, {1}}};
    auto cache = KvStorage::allocate(spec_, {64, 64});
    cache_.emplace(std::move(*cache));
  }
  void TearDown() override {
    store_.reset();
    fs::remove_all(folder_);
  }
  void start(size_t host_blocks, bool disk, double rate = 0.0) {
    store_.reset();
    const BlockPlaces places(*cache_);
    size_t block = 0;
    for (const size_t unit : places.unit_bytes()) block += unit;
    TierStore::Options o;
    o.host_bytes = host_blocks * block;
    o.write_rate = rate;
    if (disk) {
      DiskTierOptions d;
      d.folder = folder_.string();
      d.limit = 1 << 22;
      d.identity = "test";
      d.pieces = places.piece_bytes();
      auto opened = DiskTier::open(std::move(d));
      ASSERT_TRUE(opened.ok()) << opened.status().message();
      o.disk = std::move(*opened);
    }
    auto store = TierStore::create(std::move(o), *cache_);
    ASSERT_TRUE(store.ok()) << store.status().message();
    store_ = std::move(*store);
    store_->set_on_loaded([this] { loaded_.set_value(); });
  }
  void fill(int group, int32_t block, int value) {
    for (const std::span<uint8_t> piece : BlockPlaces(*cache_).pieces(group, block)) {
      for (size_t i = 0; i < piece.size(); ++i)
        piece[i] = static_cast<uint8_t>(i + static_cast<size_t>(value));
      ++value;
    }
  }
  bool holds(int group, int32_t block, int value) {
    for (const std::span<uint8_t> piece : BlockPlaces(*cache_).pieces(group, block)) {
      for (size_t i = 0; i < piece.size(); ++i) {
        if (piece[i] != static_cast<uint8_t>(i + static_cast<size_t>(value))) return false;
      }
      ++value;
    }
    return true;
  }
  static BlockKey key_of(int i) { return {static_cast<uint64_t>(i) * 91, 1}; }
  LoadResult load(std::vector<BlockUnit> units) {
    loaded_ = {};
    auto ended = loaded_.get_future();
    const uint64_t ticket = store_->load(std::move(units));
    EXPECT_EQ(ended.wait_for(std::chrono::seconds(60)), std::future_status::ready);
    const std::vector<LoadResult> results = store_->take_loaded();
    EXPECT_EQ(results.size(), 1U);
    EXPECT_EQ(results.at(0).ticket, ticket);
    return results.at(0);
  }
  void store_all(int blocks) {
    for (int32_t i = 0; i < blocks; ++i) {
      for (int g = 0; g < 2; ++g) {
        fill(g, i, 10 * i + g);
        store_->store({key_of(i), g, i, 16}, false);
      }
    }
  }
  void expect_loads(int blocks) {
    std::vector<BlockUnit> units;
    for (int32_t i = 0; i < blocks; ++i) {
      for (int g = 0; g < 2; ++g) units.push_back({key_of(i), g, 40 + i, 16});
    }
    const LoadResult result = load(units);
    for (size_t u = 0; u < units.size(); ++u) {
      EXPECT_TRUE(result.ok[u]) << u;
      const int value = 10 * (units[u].block - 40) + units[u].group;
      EXPECT_TRUE(holds(units[u].group, units[u].block, value)) << u;
    }
  }

  fs::path folder_;
  KvCacheSpec spec_;
  std::optional<KvStorage> cache_;
  std::unique_ptr<TierStore> store_;
  std::promise<void> loaded_;
};

TEST_F(TierStoreTest, HostTierGivesBackTheSameBytes) {
  start(32, false);
  store_all(20);
  expect_loads(20);
  EXPECT_EQ(store_->stats().load_failures, 0);
  EXPECT_TRUE(store_->check().ok());
}

TEST_F(TierStoreTest, DiskTierGivesThemBackToAnotherStore) {
  start(32, true);
  store_all(20);
  start(2, true);  // the first writes what is queued before it ends
  EXPECT_EQ(store_->stats().disk.blocks, 40);
  expect_loads(20);
}

TEST_F(TierStoreTest, BlocksWithoutRoomAreLeftOut) {
  start(4, false);
  store_all(20);
  EXPECT_FALSE(store_->has(key_of(0), 0));
  EXPECT_TRUE(store_->has(key_of(19), 0));
  const LoadResult result = load({{key_of(0), 0, 40, 16}, {key_of(19), 0, 41, 16}});
  EXPECT_EQ(result.ok, (std::vector<bool>{false, true}));
  EXPECT_EQ(store_->stats().load_failures, 1);
}

TEST_F(TierStoreTest, BandwidthHasABudgetButSwapsDoNot) {
  start(32, false, 1.0);  // one byte a second
  fill(0, 0, 1);
  EXPECT_FALSE(store_->store({key_of(0), 0, 0, 16}, false));
  EXPECT_EQ(store_->stats().stores_skipped, 1);
  EXPECT_TRUE(store_->store({key_of(0), 0, 0, 16}, true));
  EXPECT_TRUE(store_->has(key_of(0), 0));
}

TEST_F(TierStoreTest, ABlockInPartStaysOnTheHost) {
  start(8, true);
  fill(0, 0, 3);
  EXPECT_TRUE(store_->store({key_of(7), 0, 0, 5}, true));
  store_->flush();
  EXPECT_EQ(store_->stats().disk.blocks, 0);
  EXPECT_TRUE(load({{key_of(7), 0, 50, 5}}).ok[0]);
  EXPECT_TRUE(holds(0, 50, 3));
}

TEST_F(TierStoreTest, LoadsOnlyWhatIsFasterThanComputing) {
  start(8, false);
  store_all(4);
  const BlockUnit unit{key_of(0), 0, 40, 16};
  EXPECT_TRUE(store_->pays({&unit, 1}, 16, false)) << "nothing is known yet";
  store_->note_compute(1'000'000'000, 1e-6);
  EXPECT_FALSE(store_->pays({&unit, 1}, 16, false));
  for (int i = 0; i < 100; ++i) store_->note_compute(10, 1.0);
  EXPECT_TRUE(store_->pays({&unit, 1}, 16, true));
}

}  // namespace
}  // namespace freshet::kv_cache

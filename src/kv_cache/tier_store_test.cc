#include "kv_cache/tier_store.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {
namespace {

namespace fs = std::filesystem;

// Stands for a device's memory.
class OtherMemory final : public Memory {
 public:
  Result<void*> take(size_t bytes) override {
    void* const memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(memory, 0, bytes);
    return memory;
  }
  void give_back(void* memory) override { std::free(memory); }
  void copy(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
};

// Copies as late as a lane may: when it is waited for, or when later work needs it.
class LateLane final : public ops::CopyLane {
 public:
  explicit LateLane(ops::LaneLayers layers) : layers_(std::move(layers)) {}
  void follow() override { followed_ = true; }
  void precede() override { wait(); }
  void copy(int group, std::span<const ops::LaneUnit> units, bool to_device) override {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(followed_) << "copies that do not wait for the steps before";
    for (const ops::LaneUnit& unit : units) late_.push_back({group, unit, to_device});
  }
  void wait() override {
    const std::lock_guard lock(mutex_);
    for (const auto& [group, unit, to_device] : late_) {
      for (const ops::LaneLayer& layer : layers_[static_cast<size_t>(group)]) {
        uint8_t* const there = layer.data + unit.block * layer.bytes;
        uint8_t* const here = unit.host + layer.offset;
        std::memcpy(to_device ? there : here, to_device ? here : there,
                    static_cast<size_t>(layer.bytes));
      }
    }
    late_.clear();
  }

 private:
  struct Late {
    int group = 0;
    ops::LaneUnit unit;
    bool to_device = false;
  };
  const ops::LaneLayers layers_;
  std::mutex mutex_;
  std::vector<Late> late_;
  bool followed_ = false;
};

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
    o.readers = readers_;
    o.now_ns = clock_;
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
    if (!cache_->in_host_memory()) {
      o.open_lane = [](const ops::LaneLayers& layers) {
        return std::make_unique<LateLane>(layers);
      };
      o.lane_memory = &memory_;
    }
    auto store = TierStore::create(std::move(o), *cache_);
    ASSERT_TRUE(store.ok()) << store.status().message();
    store_ = std::move(*store);
    store_->set_on_loaded([this] { loaded_.set_value(); });
  }
  void move_to_device() {
    auto cache = KvStorage::allocate(spec_, {64, 64}, &memory_);
    cache_.emplace(std::move(*cache));
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

  int readers_ = 2;
  int64_t (*clock_)() = nullptr;
  fs::path folder_;
  OtherMemory memory_;
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

TEST_F(TierStoreTest, BlocksOfADeviceComeBackFromBothTiers) {
  move_to_device();
  start(32, true);
  store_all(20);
  EXPECT_FALSE(store_->has(key_of(0), 0)) << "nothing was copied yet";
  store_->before_step();
  for (int32_t i = 0; i < 20; ++i) fill(0, i, 99);  // what a later step writes
  store_->flush();
  EXPECT_EQ(store_->stats().stores, 40);
  expect_loads(20);
  start(2, true);  // from the disk alone
  expect_loads(20);
  EXPECT_EQ(store_->stats().load_failures, 0);
  EXPECT_TRUE(store_->check().ok());
}

// The last step of a server's life stores blocks, too, and no other follows it.
TEST_F(TierStoreTest, WhatTheLastStepOfADeviceStoredIsWritten) {
  move_to_device();
  start(32, true);
  store_all(20);
  store_->stop();
  for (int32_t i = 0; i < 20; ++i) {
    for (int g = 0; g < 2; ++g) fill(g, i, 99);  // the cache's memory is free again
  }
  start(2, true);
  EXPECT_EQ(store_->stats().disk.blocks, 40);
  expect_loads(20);
}

// A load of blocks from both tiers says of each tier what its own blocks took. With a clock that a
// look moves on by a millisecond, copies of four units together take one, and each unit of the disk
// takes one more.
TEST_F(TierStoreTest, MixedLoadsOfADeviceMeasureEachTier) {
  move_to_device();
  readers_ = 1;
  static std::atomic<int64_t> now = 0;
  clock_ = [] { return now += 1'000'000; };
  start(8, true);
  store_all(2);
  start(8, true);  // these are on the disk alone
  for (int32_t i = 10; i < 12; ++i) store_->store({key_of(i), 0, i, 5}, true);  // on the host alone
  store_->before_step();
  store_->flush();
  for (int turn = 0; turn < 300; ++turn) {
    const LoadResult result = load({{key_of(10), 0, 40, 5},
                                    {key_of(0), 0, 41, 16},
                                    {key_of(11), 0, 42, 5},
                                    {key_of(1), 0, 43, 16}});
    ASSERT_EQ(result.ok, std::vector<bool>(4, true));
  }
  const TierStats s = store_->stats();
  EXPECT_NEAR(s.host_rate / s.disk_rate, 5.0, 0.1);
}

// A load may be given a block that has just been stored: its copy comes first.
TEST_F(TierStoreTest, LoadsOfADeviceWaitForStores) {
  move_to_device();
  start(8, false);
  fill(0, 3, 5);
  fill(0, 4, 6);
  store_->store({key_of(1), 0, 3, 16}, false);
  store_->before_step();
  store_->flush();
  store_->store({key_of(2), 0, 4, 16}, true);
  EXPECT_TRUE(load({{key_of(1), 0, 4, 16}}).ok[0]);
  EXPECT_TRUE(holds(0, 4, 5));
  store_->flush();
  EXPECT_TRUE(load({{key_of(2), 0, 50, 16}}).ok[0]);
  EXPECT_TRUE(holds(0, 50, 6));
}

TEST_F(TierStoreTest, ADeviceNeedsLanes) {
  move_to_device();
  TierStore::Options o;
  o.host_bytes = 1 << 20;
  const auto store = TierStore::create(std::move(o), *cache_);
  ASSERT_FALSE(store.ok());
  EXPECT_EQ(store.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(store.status().message().find("--kv-cache-dir"), std::string::npos);
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

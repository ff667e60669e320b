// The tiers of a cache: a BlockStore over a HostTier and, if there is one, a DiskTier.
//
// store() copies a block into a slot of the host tier at once, on the caller's thread; a writer
// thread, which on the CPU gives way to those that compute, takes it from there to the disk. If the
// buffer is full because the writer is behind, or the bandwidth budget is spent, the block is left
// out. Loads run on reader threads, which write straight into the blocks of the cache: from slots,
// or from files with one call for all layers. Destroying the store drops loads that wait and writes
// what is queued for the disk.
//
// A cache on a device is copied by two lanes (ops/copy_lane.h), and the host tier is in memory that
// they reach. store() then only lists the block; before_step() starts the copies, behind the steps
// that computed the blocks and in front of the next one, which may overwrite them. Loads run behind
// the steps that were enqueued before, beside later ones; what comes from the disk goes through a
// buffer.
//
// The cache's memory must live until stop(), and the device as long as the store. One thread calls
// the BlockStore functions and before_step(), any thread stats().
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_store.h"
#include "kv_cache/disk_tier.h"
#include "kv_cache/host_tier.h"
#include "kv_cache/kv_storage.h"
#include "ops/copy_lane.h"

namespace freshet::kv_cache {

// Where the blocks of a cache lie.
class BlockPlaces {
 public:
  explicit BlockPlaces(const KvStorage& storage);
  // [groups][layers of the group]
  const std::vector<std::vector<size_t>>& piece_bytes() const { return bytes_; }
  std::vector<size_t> unit_bytes() const;
  ops::LaneLayers lane_layers() const;
  BlockPieces pieces(int group, int32_t block) const;
  bool in_host_memory() const { return host_; }

 private:
  std::vector<std::vector<uint8_t*>> layers_;
  std::vector<std::vector<size_t>> bytes_;
  bool host_ = true;
};

struct TierStats {
  int64_t store_bytes = 0, load_bytes = 0;
  double store_seconds = 0.0, load_seconds = 0.0;
  int64_t stores = 0, loads = 0;            // blocks
  int64_t stores_skipped = 0;               // blocks: no room, or no bandwidth
  int64_t load_failures = 0;                // blocks that were there and could not be read
  int64_t swapped = 0;                      // blocks stored because their sequence was preempted
  double host_usage = 0.0;                  // 0..1
  double host_rate = 0.0, disk_rate = 0.0;  // bytes a second of loads, as pays() expects them
  DiskTier::Stats disk;
};

class TierStore final : public BlockStore {
 public:
  struct Options {
    size_t host_bytes = 0;
    std::string host_policy = "lru";
    std::unique_ptr<DiskTier> disk;  // may be nullptr
    int readers = 2;
    double load_seconds = 50e-6;    // that a load takes besides those of its bytes, for pays()
    double write_rate = 2e9;        // bytes a second of store(), swaps apart; 0: no limit
    int64_t (*now_ns)() = nullptr;  // nullptr: the steady clock
    // For a cache on a device.
    std::function<std::unique_ptr<ops::CopyLane>(const ops::LaneLayers&)> open_lane;
    Memory* lane_memory = nullptr;
  };
  // Errors: kUnsupported (a cache on a device without lanes), kInvalidArgument (too little host
  // memory).
  static Result<std::unique_ptr<TierStore>> create(Options options, const KvStorage& storage);
  ~TierStore() override;

  BlockKey root(std::string_view salt) const override { return keys_.root(salt); }
  BlockKey next(const BlockKey& parent, std::span<const int32_t> tokens) const override {
    return keys_.next(parent, tokens);
  }
  bool has(const BlockKey& key, int group) override;
  void touch(std::span<const BlockKey> keys) override;
  bool store(const BlockUnit& unit, bool swap) override;
  bool pays(std::span<const BlockUnit> units, int64_t tokens, bool swap) override;
  uint64_t load(std::vector<BlockUnit> units) override;
  std::vector<LoadResult> take_loaded() override;

  // To be called before work is enqueued that may overwrite blocks that were stored.
  void before_step();
  // Called by a reader when a load has ended. Must be set before the first load.
  void set_on_loaded(std::function<void()> on_loaded) { on_loaded_ = std::move(on_loaded); }
  // Ends the threads as the destructor does, after the copies of what was stored: from then on the
  // cache's memory is not used. By the thread that calls the BlockStore functions, or after it.
  void stop();
  const BlockPlaces& places() const { return places_; }
  size_t host_bytes() const { return host_.bytes(); }
  // What computing prompt tokens has taken, for pays().
  void note_compute(int64_t tokens, double seconds);
  TierStats stats() const;
  void flush();  // waits until all that was stored is on the disk, or has failed
  Status check() const;

 private:
  struct Write {
    BlockUnit unit;
    int32_t slot = 0;
    bool copied = true;  // the slot's bytes are complete
    bool to_disk = true;
    bool swap = false;
    int64_t from_ns = 0;  // when it was stored
  };
  struct Load {
    uint64_t ticket = 0;
    std::vector<BlockUnit> units;
    std::vector<uint8_t> ok;  // written by the reader of each unit
    size_t next = 0;          // the first unit that no reader has taken
    size_t left = 0;          // units that have not ended
    int64_t started_at = 0;
  };

  // The lanes of a cache on a device.
  struct Lanes {
    std::unique_ptr<ops::CopyLane> stores, loads;
    std::mutex loading;         // around loads->copy()
    std::vector<Write> listed;  // by store(), for before_step()
  };

  TierStore(Options options, BlockPlaces places, HostTier host, const BlockSecret& secret,
            std::unique_ptr<Lanes> lanes);
  bool within_budget(size_t bytes);
  void write_blocks();
  void start();
  void complete(const Write& write);
  void read_blocks(std::span<uint8_t> buffer);
  bool read_unit(const BlockUnit& unit);
  bool read_disk(const BlockUnit& unit, uint8_t* to);
  void read_by_lane(std::span<const BlockUnit> units, uint8_t* ok, std::span<uint8_t> buffer);
  void count_load(const BlockUnit& unit, bool ok, bool from_host, int64_t ns);

  Options options_;
  const BlockPlaces places_;
  const std::vector<size_t> unit_bytes_;
  const BlockKeys keys_;
  const std::unique_ptr<Lanes> lanes_;  // nullptr: the cache is in host memory
  std::vector<Buffer> buffers_;         // [readers] of what comes from the disk, for lanes
  std::function<void()> on_loaded_;
  double budget_ = 0.0;  // bytes that may be stored now
  int64_t budget_at_ = 0;
  std::atomic<double> compute_ns_ = 0.0;  // of a token; 0: not known

  mutable std::mutex mutex_;
  std::condition_variable to_write_, to_read_, idle_;
  HostTier host_;
  std::deque<Write> writes_;
  bool writing_ = false;
  std::deque<std::shared_ptr<Load>> loads_;
  std::vector<LoadResult> ended_;
  uint64_t next_ticket_ = 1;
  double host_rate_ = 8e9, disk_rate_ = 1e9;  // bytes a second of loads, measured
  TierStats stats_;
  bool stop_ = false;

  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace freshet::kv_cache

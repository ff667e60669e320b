// The tiers of a cache in host memory: a BlockStore over a HostTier and, if there is one, a
// DiskTier.
//
// store() copies a block into a slot of the host tier at once, on the caller's thread; a writer
// thread takes it from there to the disk. If the writer is behind, or the bandwidth budget is
// spent, the block is left out. Loads run on reader threads, which write straight into the blocks
// of the cache: from slots, or from files with one call for all layers. Destroying the store drops
// loads that wait and writes what is queued for the disk.
//
// The cache's memory must live until stop(). One thread calls the BlockStore functions, any thread
// stats(). A cache on a device would be copied through Device::fetch() and write() on the step
// thread; that is not there, so create() refuses it.
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

namespace freshet::kv_cache {

// Where the blocks of a cache lie.
class BlockPlaces {
 public:
  explicit BlockPlaces(const KvStorage& storage);
  // [groups][layers of the group]
  const std::vector<std::vector<size_t>>& piece_bytes() const { return bytes_; }
  std::vector<size_t> unit_bytes() const;
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
  int64_t stores = 0, loads = 0;  // blocks
  int64_t stores_skipped = 0;     // blocks: no room, or no bandwidth
  int64_t load_failures = 0;      // blocks that were there and could not be read
  int64_t swapped = 0;            // blocks stored because their sequence was preempted
  double host_usage = 0.0;        // 0..1
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
  };
  // Errors: kUnsupported (a cache on a device), kInvalidArgument (too little host memory).
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

  // Called by a reader when a load has ended. Must be set before the first load.
  void set_on_loaded(std::function<void()> on_loaded) { on_loaded_ = std::move(on_loaded); }
  // Ends the threads as the destructor does: from then on the cache's memory is not used.
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
  };
  struct Load {
    uint64_t ticket = 0;
    std::vector<BlockUnit> units;
    std::vector<uint8_t> ok;  // written by the reader of each unit
    size_t next = 0;          // the first unit that no reader has taken
    size_t left = 0;          // units that have not ended
    int64_t started_at = 0;
  };

  TierStore(Options options, BlockPlaces places, HostTier host, const BlockSecret& secret);
  bool within_budget(size_t bytes);
  void write_blocks();
  void read_blocks();
  bool read_unit(const BlockUnit& unit);

  Options options_;
  const BlockPlaces places_;
  const std::vector<size_t> unit_bytes_;
  const BlockKeys keys_;
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

// Tiers below the cache, as the scheduler sees them: copies of cached blocks, found by key.
//
// A store holds whole blocks of one group each. The scheduler asks which blocks of a prefix are
// there, offers blocks that have been computed, and orders loads: a load has a ticket, runs beside
// the steps, and writes to blocks that the scheduler has allocated and keeps until it ends. A block
// that cannot be read, or whose checksum is wrong, is reported as missing and never delivered.
// Called by one thread; implementations do their reads and writes on threads of their own.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kv_cache/block_key.h"

namespace freshet::kv_cache {

// A block of the cache and its key. `tokens`: how many slots are filled.
struct BlockUnit {
  BlockKey key;
  int32_t group = 0;
  int32_t block = 0;
  int32_t tokens = 0;
};

struct LoadResult {
  uint64_t ticket = 0;
  std::vector<bool> ok;  // [units] of the order
};

class BlockStore {
 public:
  virtual ~BlockStore() = default;

  virtual BlockKey root(std::string_view salt) const = 0;
  virtual BlockKey next(const BlockKey& parent, std::span<const int32_t> tokens) const = 0;
  // Whether the block is there now. A later load may still fail.
  virtual bool has(const BlockKey& key, int group) = 0;
  // The prefix with these keys is in use: its beginning is to be kept longest.
  virtual void touch(std::span<const BlockKey> keys) = 0;

  // Copies the block. Returns whether it is stored: it may be left out for lack of room or
  // bandwidth. `swap`: it belongs to a sequence that is losing its blocks.
  virtual bool store(const BlockUnit& unit, bool swap) = 0;
  // Whether loading these units is expected to take less time than computing the tokens. `swap`:
  // they are not stored yet.
  virtual bool pays(std::span<const BlockUnit> units, int64_t tokens, bool swap) = 0;
  // Starts a load; returns its ticket, which is not 0. Its blocks must stay until it has ended.
  virtual uint64_t load(std::vector<BlockUnit> units) = 0;
  virtual std::vector<LoadResult> take_loaded() = 0;  // that ended since the last call
};

}  // namespace freshet::kv_cache

// Which block of a tier is evicted next: least recently used, or ARC.
//
// ARC (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003) keeps
// blocks that were used once apart from those used again, and moves the border between the two by
// remembering the keys of what it evicted. Not synchronised.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "kv_cache/block_key.h"

namespace freshet::kv_cache {

class TierPolicy {
 public:
  virtual ~TierPolicy() = default;
  virtual void added(const BlockKey& key) = 0;  // REQUIRES: it is not there
  virtual void used(const BlockKey& key) = 0;   // REQUIRES: it is there
  virtual void erased(const BlockKey& key) = 0;
  // Removes and returns the key to evict, of those that `may_go`; false: there is none. `incoming`:
  // the block that needs the room.
  virtual bool evict(const BlockKey& incoming, const std::function<bool(const BlockKey&)>& may_go,
                     BlockKey& key) = 0;
};

// "lru" or "arc"; `capacity` in blocks.
Result<std::unique_ptr<TierPolicy>> make_tier_policy(std::string_view name, size_t capacity);

}  // namespace freshet::kv_cache

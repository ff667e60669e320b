// The order in which the idle blocks of one pool are evicted.
//
// An idle block is held by the prefix tree only. BlockCache decides which idle blocks may be
// evicted now (with full attention only the leaves of the tree, because a prefix is useless without
// its beginning); a policy decides which of them goes first. Not synchronised.
#pragma once

#include <cstdint>
#include <memory>

namespace freshet::kv_cache {

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  // The last sequence released the block: it is idle.
  virtual void released(int32_t block) = 0;
  // Whether an idle block may be evicted now. add() may be repeated.
  virtual void add(int32_t block) = 0;
  virtual void remove(int32_t block) = 0;
  virtual bool contains(int32_t block) const = 0;
  // The block to evict first; kNoBlock if none may be evicted.
  virtual int32_t first() const = 0;
};

// For a pool of `blocks` ids. Least recently used: the block that was released first.
std::unique_ptr<EvictionPolicy> make_lru_policy(int32_t blocks);

}  // namespace freshet::kv_cache

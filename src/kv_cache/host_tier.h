// The tier of blocks in host memory.
//
// Each group has the same number of slots, and a slot has the bytes of one block in all layers of
// the group, one layer after another. A slot with holders is never evicted: it is being filled,
// read, or waits to be written elsewhere. Its memory comes from one allocation. The books are not
// synchronised; the bytes of a slot may be used without the owner's lock by whoever holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_key.h"
#include "kv_cache/tier_policy.h"
#include "tensor/buffer.h"

namespace freshet::kv_cache {

class HostTier {
 public:
  // unit_bytes[g]: of a block of group g. memory: where to allocate, nullptr for the heap. Errors:
  // not even one block of each group fits.
  static Result<HostTier> create(size_t bytes, std::vector<size_t> unit_bytes,
                                 std::string_view policy, Memory* memory = nullptr);

  int groups() const { return static_cast<int>(groups_.size()); }
  int32_t slots() const { return slots_; }  // of each group
  int32_t used(int group) const;
  size_t bytes() const { return memory_.size(); }
  std::span<uint8_t> data(int group, int32_t slot);

  // The slot of a block whose bytes are complete; kNoBlock if it is not there.
  int32_t find(const BlockKey& key, int group) const;
  bool contains(const BlockKey& key, int group) const;  // complete or not
  // A slot for the block, evicting another if needed, with one holder and not complete; kNoBlock if
  // all are held. REQUIRES: !contains(key, group).
  int32_t take(const BlockKey& key, int group);
  void complete(int group, int32_t slot);  // its bytes are valid
  void hold(int group, int32_t slot);
  void drop(int group, int32_t slot);  // a slot without holders that is not complete becomes free
  void touch(const BlockKey& key, int group);
  void erase(const BlockKey& key, int group);  // REQUIRES: no holders

  // An error unless each slot is free or has one key, and the policy knows the same keys.
  Status check() const;

 private:
  struct Slot {
    BlockKey key;
    int32_t holders = 0;
    bool taken = false;
    bool complete = false;
  };
  struct Group {
    size_t unit_bytes = 0;
    size_t offset = 0;  // in the memory
    std::vector<Slot> slots;
    std::vector<int32_t> free;
    std::unordered_map<BlockKey, int32_t, BlockKeyHash> index;
    std::unique_ptr<TierPolicy> policy;
  };
  Group& at(int group) { return groups_[static_cast<size_t>(group)]; }
  const Group& at(int group) const { return groups_[static_cast<size_t>(group)]; }
  void set_free(Group& g, int32_t slot);

  int32_t slots_ = 0;
  Buffer memory_;
  std::vector<Group> groups_;
};

}  // namespace freshet::kv_cache

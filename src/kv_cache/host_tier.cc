#include "kv_cache/host_tier.h"

#include <algorithm>

#include "base/units.h"
#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {

Result<HostTier> HostTier::create(size_t bytes, std::vector<size_t> unit_bytes,
                                  std::string_view policy, Memory* memory) {
  size_t of_all = 0;
  for (const size_t unit : unit_bytes) of_all += unit;
  FRESHET_CHECK(of_all > 0, "a cache without layers");
  if (bytes < of_all) {
    return invalid_argument("{} of host memory for the cache: a block takes {}",
                            format_bytes(bytes), format_bytes(of_all));
  }
  HostTier tier;
  tier.slots_ = static_cast<int32_t>(std::min<size_t>(bytes / of_all, INT32_MAX / 2));
  const auto slots = static_cast<size_t>(tier.slots_);
  FRESHET_ASSIGN_OR_RETURN(tier.memory_, Buffer::allocate(slots * of_all, memory));
  size_t offset = 0;
  for (const size_t unit : unit_bytes) {
    Group& g = tier.groups_.emplace_back();
    g.unit_bytes = unit;
    g.offset = offset;
    offset += unit * slots;
    g.slots.resize(slots);
    for (int32_t slot = tier.slots_ - 1; slot >= 0; --slot) g.free.push_back(slot);
    FRESHET_ASSIGN_OR_RETURN(g.policy, make_tier_policy(policy, slots));
  }
  return tier;
}

int32_t HostTier::used(int group) const {
  return slots_ - static_cast<int32_t>(at(group).free.size());
}

std::span<uint8_t> HostTier::data(int group, int32_t slot) {
  const Group& g = at(group);
  return {memory_.data() + g.offset + g.unit_bytes * static_cast<size_t>(slot), g.unit_bytes};
}

int32_t HostTier::find(const BlockKey& key, int group) const {
  const Group& g = at(group);
  const auto found = g.index.find(key);
  if (found == g.index.end() || !g.slots[static_cast<size_t>(found->second)].complete)
    return kNoBlock;
  return found->second;
}

bool HostTier::contains(const BlockKey& key, int group) const {
  return at(group).index.contains(key);
}

int32_t HostTier::take(const BlockKey& key, int group) {
  Group& g = at(group);
  FRESHET_CHECK(!g.index.contains(key), "a block is in the host tier already");
  if (g.free.empty()) {
    const auto may_go = [&](const BlockKey& k) {
      return g.slots[static_cast<size_t>(g.index.at(k))].holders == 0;
    };
    BlockKey evicted;
    if (!g.policy->evict(key, may_go, evicted)) return kNoBlock;
    const int32_t slot = g.index.at(evicted);
    g.index.erase(evicted);
    set_free(g, slot);
  }
  const int32_t slot = g.free.back();
  g.free.pop_back();
  g.slots[static_cast<size_t>(slot)] = {key, 1, true, false};
  g.index[key] = slot;
  g.policy->added(key);
  return slot;
}

void HostTier::set_free(Group& g, int32_t slot) {
  g.slots[static_cast<size_t>(slot)] = {};
  g.free.push_back(slot);
}

void HostTier::complete(int group, int32_t slot) {
  at(group).slots[static_cast<size_t>(slot)].complete = true;
}

void HostTier::hold(int group, int32_t slot) {
  ++at(group).slots[static_cast<size_t>(slot)].holders;
}

void HostTier::drop(int group, int32_t slot) {
  Slot& s = at(group).slots[static_cast<size_t>(slot)];
  FRESHET_CHECK(s.holders > 0, "slot {} has no holder", slot);
  if (--s.holders == 0 && !s.complete) erase(s.key, group);
}

void HostTier::touch(const BlockKey& key, int group) {
  if (contains(key, group)) at(group).policy->used(key);
}

void HostTier::erase(const BlockKey& key, int group) {
  Group& g = at(group);
  const auto found = g.index.find(key);
  FRESHET_CHECK(found != g.index.end() && g.slots[static_cast<size_t>(found->second)].holders == 0);
  const int32_t slot = found->second;
  g.policy->erased(key);
  g.index.erase(found);
  set_free(g, slot);
}

Status HostTier::check() const {
  for (int i = 0; i < groups(); ++i) {
    const Group& g = at(i);
    if (g.index.size() + g.free.size() != g.slots.size()) {
      return internal_error("group {}: {} keys and {} free slots of {}", i, g.index.size(),
                            g.free.size(), g.slots.size());
    }
    for (const auto& [key, slot] : g.index) {
      const Slot& s = g.slots[static_cast<size_t>(slot)];
      if (!s.taken || s.key != key) return internal_error("group {}: slot {} lost", i, slot);
    }
    for (const int32_t slot : g.free) {
      if (g.slots[static_cast<size_t>(slot)].taken)
        return internal_error("group {}: slot {} is free and taken", i, slot);
    }
  }
  return {};
}

}  // namespace freshet::kv_cache

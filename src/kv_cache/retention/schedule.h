// When a live sequence evicts keys and values (KV compression, retention.h): positions that follow
// from the prompt's length alone. Pure.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {

inline constexpr int32_t kNeverEvicts = std::numeric_limits<int32_t>::max();

struct EvictionSchedule {
  RetentionRules rules;
  std::vector<int32_t> budgets;  // [groups] slots kept; 0: the group does not evict
  // [groups] with rules.recodes: how many coarse blocks a block holds (ops::CoarseTokens).
  std::vector<int32_t> parts = {};

  // The first position after `computed` where some group holds more than its budget and evicts.
  // evicted: [groups] tokens evicted before, or empty for none.
  int32_t next(int32_t prompt, int32_t computed, std::span<const int32_t> evicted) const;
  // Queries from this position on are scored for an eviction at `next`.
  int32_t scored_from(int32_t prompt, int32_t next) const;
  // The most slots of a group that a sequence of `end` tokens holds at once, from its start on or
  // behind an eviction.
  int32_t most_slots(int group, int32_t prompt, int32_t end, bool started) const;
};

}  // namespace freshet::kv_cache

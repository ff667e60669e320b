// Scoring and evicting keys of one sequence (KV compression, kv_cache/retention/retention.h), in
// all layers. No step may be in flight.
#pragma once

#include <cstdint>
#include <span>

#include "kv_cache/kv_storage.h"
#include "kv_cache/retention/schedule.h"
#include "ops/ops.h"
#include "scheduler/sequence.h"

namespace freshet::engine {

// Makes room for the sums of slots[g] slots in the groups that evict.
void reserve_scores(const KvCacheSpec& cache, const kv_cache::EvictionSchedule& schedule,
                    std::span<const int32_t> slots, kv_cache::KeyScores& scores);

void evict_keys(ops::Ops& ops, const KvStorage& cache, const scheduler::Eviction& eviction,
                const kv_cache::RetentionPolicy& policy);

}  // namespace freshet::engine

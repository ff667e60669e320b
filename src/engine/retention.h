// What a request's choice of kv_eviction means for a model's cache. Pure.
#pragma once

#include "freshet/engine.h"
#include "kv_cache/kv_storage.h"
#include "kv_cache/retention/schedule.h"

namespace freshet::engine {

// The policy of a request: its own, or else `usual`; nullptr: all keys are kept. Requests for
// embeddings have no use for the usual one. Errors name the key of the JSON object.
Result<kv_cache::Retention> retention_of(const Request& request, const kv_cache::Retention& usual);

// The groups' budgets. Errors: the cache has no group that can evict, or a group's layers would
// keep different numbers of slots.
Result<kv_cache::EvictionSchedule> eviction_schedule(const kv_cache::RetentionPolicy& policy,
                                                     const KvCacheSpec& cache);

// An engine's own policy.
struct UsualRetention {
  kv_cache::Retention policy;
  // > 0: with it a sequence never holds more slots of a layer that evicts.
  int32_t max_slots = 0;
};
// From EngineOptions::kv_eviction. A policy whose budget differs by layer gets groups of single
// layers in `cache`.
Result<UsualRetention> usual_retention(const EngineOptions& options, bool on_device,
                                       KvCacheSpec& cache);

}  // namespace freshet::engine

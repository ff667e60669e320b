// The memory plan of an engine: what its options, its model, a drafter, a tower for pictures and
// the tiers of the cache ask for, made before any weight is read. Reads how much memory is free;
// otherwise pure. Errors are one line.
#pragma once

#include <optional>

#include "engine/plan.h"
#include "engine/retention.h"
#include "freshet/engine.h"
#include "kv_cache/sparse_attention.h"
#include "loader/checkpoint.h"
#include "media/image_settings.h"
#include "runtime/loaded_model.h"
#include "speculative/config.h"

namespace freshet::engine {

struct CacheLayout {
  KvTypes types;
  KvCacheSpec kv;
  UsualRetention retention;
  kv_cache::SparseAttention sparse;
};

Result<CacheLayout> cache_layout(const EngineOptions& options, const runtime::Compute& compute,
                                 const ModelSpec& spec);

// `speculation`: nullptr: none. `host_tier`: bytes of host memory that a tier takes. `pictures`:
// nothing if the model reads none.
Result<MemoryPlan> plan_memory(const EngineOptions& options, const runtime::LoadOptions& loading,
                               const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                               const speculative::Config* speculation, size_t host_tier,
                               const CacheLayout& layout,
                               const std::optional<media::ImageSettings>& pictures,
                               runtime::Compute& compute);

}  // namespace freshet::engine

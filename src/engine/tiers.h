// The tiers below an engine's KV cache: from its options to a running store.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "freshet/engine.h"
#include "kv_cache/tier_config.h"
#include "kv_cache/tier_store.h"
#include "layers/spec.h"
#include "loader/checkpoint.h"
#include "ops/ops.h"

namespace freshet::engine {

// Errors: values that are wrong or do not go together.
Result<kv_cache::TierConfig> tier_config(const EngineOptions& options);

// An error unless prefixes of the model can be kept in tiers and in files.
Status keeps_prefixes(const ModelSpec& spec, const std::vector<KvGroup>& groups, bool shared);

// Everything that the bits of a cached block depend on, as lines of text: program, model, kernels,
// types and shapes of the cache.
std::string cache_identity(const EngineOptions& options, const loader::Checkpoint& checkpoint,
                           const ops::Ops& ops, const KvCacheSpec& cache);

// REQUIRES: config.wanted(). Opens the folder and makes a store over `cache`, which may be moved
// later. `device`: whose memory the cache is in, or nullptr.
Result<std::unique_ptr<kv_cache::TierStore>> open_tiers(const kv_cache::TierConfig& config,
                                                        const std::string& identity,
                                                        const KvStorage& cache,
                                                        ops::Device* device);
// Lines for --verbose, each after a line break.
std::string describe_tiers(const kv_cache::TierConfig& config, const kv_cache::TierStore& store);
EngineStats::Tiers tier_numbers(const kv_cache::TierStore& store);

}  // namespace freshet::engine

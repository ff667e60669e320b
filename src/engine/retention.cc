#include "engine/retention.h"

#include <algorithm>

namespace freshet::engine {

Result<kv_cache::Retention> retention_of(const Request& request, const kv_cache::Retention& usual) {
  if (!request.kv_eviction.empty()) return kv_cache::make_retention(request.kv_eviction);
  return request.pooling != Pooling::kNone ? nullptr : usual;
}

namespace {

// Why no key of the cache can be evicted.
Status check_evictions(const KvCacheSpec& cache) {
  if (cache.state_group() >= 0)
    return unsupported(
        "kv_eviction: models with states (state-space or linear attention) keep all keys");
  bool two_way = false, biased = false, full = false;
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    const KvGroup& group = cache.groups[g];
    if (group.cross > 0) return unsupported("kv_eviction: encoder-decoders keep all keys");
    two_way = two_way || group.two_way;
    full = full || cache.may_evict(static_cast<int>(g));
    for (const int layer : group.layers) {
      const ops::KvShape& shape = cache.layers[static_cast<size_t>(layer)].shape;
      biased = biased || shape.biased;
    }
  }
  if (two_way) return unsupported("kv_eviction: models that read both ways keep all keys");
  if (biased) return unsupported("kv_eviction: models with a bias by distance keep all keys");
  if (!full) return unsupported("kv_eviction: no layer of this model attends to all tokens");
  return {};
}

// How many coarse blocks a block of the group holds.
Result<int32_t> coarse_parts(const KvCacheSpec& cache, int group) {
  if (!cache.may_evict(group)) return 0;
  const int32_t parts = cache.coarse_parts(group);
  if (parts > 1) return parts;
  const KvGroup& its = cache.groups[static_cast<size_t>(group)];
  const ops::KvShape& shape = cache.layers[static_cast<size_t>(its.layers.front())].shape;
  if (shape.value_is_key_prefix)
    return unsupported(
        "kv_eviction: mikv: latent attention (MLA) keeps no keys in 4 bits; use another policy");
  return unsupported(
      "kv_eviction: mikv saves nothing beside a cache of {} with heads of {}; use {}",
      cache.type_names(group), shape.key_dim,
      ops::info(shape.type).key.bits < 16 ? "--kv-cache-dtype f16, or another policy"
                                          : "another policy");
}

}  // namespace

Result<kv_cache::EvictionSchedule> eviction_schedule(const kv_cache::RetentionPolicy& policy,
                                                     const KvCacheSpec& cache) {
  FRESHET_RETURN_IF_ERROR(check_evictions(cache));
  std::vector<int> evicting;  // layers
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    if (!cache.may_evict(static_cast<int>(g))) continue;
    evicting.insert(evicting.end(), cache.groups[g].layers.begin(), cache.groups[g].layers.end());
  }
  std::ranges::sort(evicting);
  kv_cache::EvictionSchedule schedule;
  schedule.rules = policy.rules();
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    int32_t& budget = schedule.budgets.emplace_back(0);
    if (!cache.may_evict(static_cast<int>(g))) continue;
    for (const int layer : cache.groups[g].layers) {
      const auto index = std::ranges::lower_bound(evicting, layer) - evicting.begin();
      const int32_t its = policy.budget(static_cast<int>(index), static_cast<int>(evicting.size()));
      if (budget != 0 && budget != its) {
        return invalid_argument(
            "kv_eviction: {0} keeps different numbers of tokens in different layers, which needs a "
            "server started with a --kv-eviction of {0}",
            policy.config().policy);
      }
      budget = its;
    }
  }
  for (size_t g = 0; schedule.rules.recodes && g < cache.groups.size(); ++g) {
    FRESHET_ASSIGN_OR_RETURN(const int32_t parts, coarse_parts(cache, static_cast<int>(g)));
    schedule.parts.push_back(parts);
  }
  return schedule;
}

Result<UsualRetention> usual_retention(const EngineOptions& options, bool on_device,
                                       KvCacheSpec& cache) {
  UsualRetention usual;
  if (options.kv_eviction.empty()) return usual;
  FRESHET_ASSIGN_OR_RETURN(usual.policy, kv_cache::make_retention(options.kv_eviction));
  if (usual.policy == nullptr) return usual;
  if (on_device && usual.policy->rules().recodes)
    return unsupported("--kv-eviction mikv needs the CPU; use --device cpu, or another policy");
  if (usual.policy->differs_by_layer()) cache = group_by_layer(cache);
  FRESHET_RETURN_IF_ERROR(eviction_schedule(*usual.policy, cache).status());
  if (usual.policy->rules().in_prompt)
    usual.max_slots = usual.policy->config().budget + usual.policy->rules().interval;
  return usual;
}

}  // namespace freshet::engine

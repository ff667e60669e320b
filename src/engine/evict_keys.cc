#include "engine/evict_keys.h"

#include <algorithm>
#include <vector>

namespace freshet::engine {
namespace {

using kv_cache::KeyScores;

// The slots of [0, slots) that are not among those of `kept`, which are ascending.
void list_others(std::span<const int32_t> kept, int32_t slots, int32_t* to) {
  auto next = kept.begin();
  for (int32_t slot = 0; slot < slots; ++slot) {
    if (next != kept.end() && *next == slot) {
      ++next;
    } else {
      *to++ = slot;
    }
  }
}

// Moves the sums of the kept slots to where these are now.
void keep_sums(const KeyScores::Layer& from, const int32_t* kept, int heads, int32_t count,
               KeyScores::Layer& to) {
  to.widen(heads, count);
  for (int64_t h = 0; h < heads; ++h) {
    for (int32_t slot = 0; slot < count; ++slot) {
      to.sums[static_cast<size_t>(h * to.stride + slot)] =
          from.sums[static_cast<size_t>(h * from.stride + kept[h * count + slot])];
    }
  }
}

}  // namespace

void reserve_scores(const KvCacheSpec& cache, const kv_cache::EvictionSchedule& schedule,
                    std::span<const int32_t> slots, KeyScores& scores) {
  scores.layers.resize(cache.layers.size());
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    if (schedule.budgets[g] == 0) continue;
    for (const int layer : cache.groups[g].layers) {
      const auto i = static_cast<size_t>(layer);
      scores.layers[i].widen(cache.layers[i].shape.kv_heads * scores.queries, slots[g]);
    }
  }
}

void evict_keys(ops::Ops& ops, const KvStorage& cache, const scheduler::Eviction& e,
                const kv_cache::RetentionPolicy& policy) {
  const KvCacheSpec& spec = cache.spec();
  if (!e.left.empty()) e.left.front()->layers.resize(spec.layers.size());
  std::vector<int32_t> kept, dropped;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (e.before[g].empty()) continue;
    for (const int layer : spec.groups[g].layers) {
      const auto i = static_cast<size_t>(layer);
      const ops::KvView view = cache.layer(layer);
      const int heads = view.shape.kv_heads;
      const int32_t count = e.kept[g], others = e.slots[g] - count;
      const KeyScores::Layer none;
      const KeyScores::Layer& scores = e.scores != nullptr ? e.scores->layers[i] : none;
      const auto read = [&](int head, float* keys) {
        ops.read_keys(view, e.before[g], head, e.slots[g], keys);
      };
      const kv_cache::StoredKeys stored{
          heads, e.slots[g], view.shape.key_dim, scores.sums.data(), scores.stride, read};
      kept.resize(static_cast<size_t>(heads) * static_cast<size_t>(count));
      dropped.resize(static_cast<size_t>(heads) * static_cast<size_t>(others));
      ops.pool().parallel_for(heads, [&](int64_t head, int) {
        const auto mine =
            std::span(kept).subspan(static_cast<size_t>(head * count), static_cast<size_t>(count));
        policy.keep(stored, static_cast<int>(head), mine);
        list_others(mine, e.slots[g], dropped.data() + head * others);
      });
      if (policy.rules().recodes) {
        ops.recode_kv(
            view, e.before[g], e.after[g], kept.data(), count,
            {dropped.data(), others, e.coarse_slots[g], spec.coarse_parts(static_cast<int>(g)),
             e.coarse_before[g], e.coarse_after[g]});
      } else {
        ops.gather_kv(view, e.before[g], e.after[g], kept.data(), count);
      }
      if (!e.left.empty()) keep_sums(scores, kept.data(), heads, count, e.left.front()->layers[i]);
    }
  }
  for (size_t twin = 1; twin < e.left.size(); ++twin) *e.left[twin] = *e.left.front();
}

}  // namespace freshet::engine

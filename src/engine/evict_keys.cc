#include "engine/evict_keys.h"

#include <algorithm>
#include <utility>
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

// What is kept of one layer.
struct Choice {
  size_t group;
  int layer;
  ops::KvView view;
  int32_t slots, count;                          // held, kept
  std::vector<int32_t> kept = {}, dropped = {};  // [kv_heads, count], [kv_heads, slots - count]
  std::vector<float> keys = {};                  // [kv_heads, slots, key_dim], or empty
};

std::vector<Choice> choices_of(const KvStorage& cache, const scheduler::Eviction& e) {
  std::vector<Choice> all;
  for (size_t g = 0; g < cache.spec().groups.size(); ++g) {
    if (e.before[g].empty()) continue;
    for (const int layer : cache.spec().groups[g].layers)
      all.push_back({g, layer, cache.layer(layer), e.slots[g], e.kept[g]});
  }
  return all;
}

// For all heads together, where only one thread may read keys from the cache.
void fetch_keys(ops::Ops& ops, const scheduler::Eviction& e, Choice& c) {
  const size_t each = static_cast<size_t>(c.slots) * static_cast<size_t>(c.view.shape.key_dim);
  c.keys.resize(static_cast<size_t>(c.view.shape.kv_heads) * each);
  for (int head = 0; head < c.view.shape.kv_heads; ++head) {
    ops.read_keys(c.view, e.before[c.group], head, c.slots,
                  c.keys.data() + static_cast<size_t>(head) * each);
  }
}

// Selects what a head of the layer keeps.
void choose(ops::Ops& ops, const scheduler::Eviction& e, const kv_cache::RetentionPolicy& policy,
            Choice& c, int head) {
  const auto read = [&](int of, float* keys) {
    FRESHET_CHECK(policy.rules().reads_keys, "{} reads keys", policy.config().policy);
    if (c.keys.empty()) return ops.read_keys(c.view, e.before[c.group], of, c.slots, keys);
    const int64_t each = int64_t{c.slots} * c.view.shape.key_dim;
    std::copy_n(c.keys.data() + of * each, each, keys);
  };
  const KeyScores::Layer none;
  const KeyScores::Layer& scores =
      e.scores != nullptr ? e.scores->layers[static_cast<size_t>(c.layer)] : none;
  const kv_cache::StoredKeys stored{c.view.shape.kv_heads, c.slots,       c.view.shape.key_dim,
                                    scores.sums.data(),    scores.stride, read};
  const auto count = static_cast<size_t>(c.count);
  const auto mine = std::span(c.kept).subspan(static_cast<size_t>(head) * count, count);
  policy.keep(stored, head, mine);
  if (!c.dropped.empty()) list_others(mine, c.slots, c.dropped.data() + head * (c.slots - c.count));
}

// For all heads of some layers.
void choose_all(ops::Ops& ops, const scheduler::Eviction& e,
                const kv_cache::RetentionPolicy& policy, std::span<Choice> choices) {
  std::vector<std::pair<Choice*, int>> tasks;
  for (Choice& c : choices) {
    const auto heads = static_cast<size_t>(c.view.shape.kv_heads);
    c.kept.resize(heads * static_cast<size_t>(c.count));
    if (policy.rules().recodes) c.dropped.resize(heads * static_cast<size_t>(c.slots - c.count));
    for (int head = 0; head < c.view.shape.kv_heads; ++head) tasks.emplace_back(&c, head);
  }
  ops.pool().parallel_for(std::ssize(tasks), [&](int64_t i, int) {
    const auto& [c, head] = tasks[static_cast<size_t>(i)];
    choose(ops, e, policy, *c, head);
  });
}

void move_kept(ops::Ops& ops, const KvCacheSpec& spec, const scheduler::Eviction& e,
               const Choice& c) {
  const size_t g = c.group;
  if (c.dropped.empty())
    return ops.gather_kv(c.view, e.before[g], e.after[g], c.kept.data(), c.count);
  ops.recode_kv(c.view, e.before[g], e.after[g], c.kept.data(), c.count,
                {c.dropped.data(), c.slots - c.count, e.coarse_slots[g],
                 spec.coarse_parts(static_cast<int>(g)), e.coarse_before[g], e.coarse_after[g]});
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
  std::vector<Choice> all = choices_of(cache, e);
  // Keys that are fetched take the memory of one layer at a time.
  const bool fetches = ops.device() != nullptr && policy.rules().reads_keys;
  const size_t at_once = fetches ? 1 : all.size();
  for (size_t first = 0; first < all.size(); first += at_once) {
    const std::span<Choice> some = std::span(all).subspan(first, at_once);
    for (Choice& c : some) {
      if (fetches) fetch_keys(ops, e, c);
    }
    choose_all(ops, e, policy, some);
    for (Choice& c : some) {
      move_kept(ops, spec, e, c);
      const auto i = static_cast<size_t>(c.layer);
      if (!e.left.empty()) {
        const KeyScores::Layer none;
        keep_sums(e.scores != nullptr ? e.scores->layers[i] : none, c.kept.data(),
                  c.view.shape.kv_heads, c.count, e.left.front()->layers[i]);
      }
      c.keys = {};
    }
  }
  for (size_t twin = 1; twin < e.left.size(); ++twin) *e.left[twin] = *e.left.front();
}

}  // namespace freshet::engine

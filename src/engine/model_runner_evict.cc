// The part of ModelRunner that scores and evicts keys.
#include <algorithm>

#include "engine/model_runner.h"

namespace freshet::engine {
namespace {

using kv_cache::kBlockTokens;
using kv_cache::KeyScores;

int64_t whole_blocks(int64_t slots) {
  return (slots + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

// Makes room for the sums of `slots` slots.
void widen(KeyScores::Layer& layer, int kv_heads, int64_t slots) {
  const int64_t stride = whole_blocks(slots);
  if (layer.stride >= stride) return;
  std::vector<int64_t> sums(static_cast<size_t>(kv_heads * stride));
  for (int h = 0; layer.stride > 0 && h < kv_heads; ++h) {
    std::copy_n(layer.sums.begin() + h * layer.stride, layer.stride, sums.begin() + h * stride);
  }
  layer.sums = std::move(sums);
  layer.stride = stride;
}

}  // namespace

// The queries of the item from Sequence::scored_from on.
void ModelRunner::score(Turn& turn, const scheduler::StepItem& part, const scheduler::Sequence& s) {
  const KvCacheSpec& spec = cache_.spec();
  KeyScores& scores = *s.scores;
  scores.layers.resize(spec.layers.size());
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (s.request->eviction->budgets[g] == 0) continue;
    for (const int layer : spec.groups[g].layers) {
      const auto i = static_cast<size_t>(layer);
      widen(scores.layers[i], spec.layers[i].shape.kv_heads,
            s.blocks.slots(static_cast<int>(g), s.evict_at));
    }
  }
  const int32_t end = part.first + part.count;
  turn.batch.scored.push_back({static_cast<int32_t>(turn.batch.context_len.size()) - 1,
                               end - std::max(part.first, s.scored_from), &scores});
}

void ModelRunner::evict(const scheduler::Eviction& e, const kv_cache::RetentionPolicy& policy) {
  ops::Ops& ops = *model_->key_ops();
  const KvCacheSpec& spec = cache_.spec();
  if (e.left != nullptr) e.left->layers.resize(spec.layers.size());
  std::vector<int32_t> kept;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (e.before[g].empty()) continue;
    for (const int layer : spec.groups[g].layers) {
      const auto i = static_cast<size_t>(layer);
      const ops::KvView view = cache_.layer(layer);
      const int heads = view.shape.kv_heads;
      const int32_t count = e.kept[g];
      const KeyScores::Layer none;
      const KeyScores::Layer& scores = e.scores != nullptr ? e.scores->layers[i] : none;
      const auto read = [&](int head, float* keys) {
        ops.read_keys(view, e.before[g], head, e.slots[g], keys);
      };
      const kv_cache::StoredKeys stored{
          heads, e.slots[g], view.shape.key_dim, scores.sums.data(), scores.stride, read};
      kept.resize(static_cast<size_t>(heads) * static_cast<size_t>(count));
      ops.pool().parallel_for(heads, [&](int64_t head, int) {
        policy.keep(
            stored, static_cast<int>(head),
            std::span(kept).subspan(static_cast<size_t>(head * count), static_cast<size_t>(count)));
      });
      ops.gather_kv(view, e.before[g], e.after[g], kept.data(), count);
      if (e.left == nullptr) continue;
      KeyScores::Layer& left = e.left->layers[i];
      widen(left, heads, count);
      for (int64_t h = 0; h < heads; ++h) {
        for (int32_t slot = 0; slot < count; ++slot) {
          left.sums[static_cast<size_t>(h * left.stride + slot)] = scores.sums[static_cast<size_t>(
              h * scores.stride + kept[static_cast<size_t>(h * count + slot)])];
        }
      }
    }
  }
}

}  // namespace freshet::engine

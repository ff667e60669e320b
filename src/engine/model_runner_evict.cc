// The part of ModelRunner that scores and evicts keys.
#include <algorithm>

#include "engine/evict_keys.h"
#include "engine/model_runner.h"

namespace freshet::engine {

// The queries of the item from Sequence::scored_from on.
void ModelRunner::score(Turn& turn, const scheduler::StepItem& part, const scheduler::Sequence& s) {
  std::vector<int32_t> slots;
  for (size_t g = 0; g < cache_.spec().groups.size(); ++g)
    slots.push_back(s.blocks.slots(static_cast<int>(g), s.evict_at));
  turn.scores.push_back(part.draft > 0 ? s.draft_scores : s.scores);
  kv_cache::KeyScores& scores = *turn.scores.back();
  reserve_scores(cache_.spec(), *s.request->eviction, slots, scores);
  const int32_t end = part.first + part.count;
  turn.batch.scored.push_back({static_cast<int32_t>(turn.batch.context_len.size()) - 1,
                               end - std::max(part.first, s.scored_from), &scores});
}

void ModelRunner::evict(const scheduler::Eviction& e, const kv_cache::RetentionPolicy& policy) {
  evict_keys(*model_->key_ops(), cache_, e, policy);
}

}  // namespace freshet::engine

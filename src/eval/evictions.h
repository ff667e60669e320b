// Evictions of keys in a session, as the engine's scheduler orders them for live sequences
// (kv_cache/retention/), over the blocks that each of the session's sequences owns all the time.
// The first `budget` tokens of a sequence count as its prompt, and all others as generated.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "kv_cache/kv_storage.h"
#include "kv_cache/retention/schedule.h"
#include "layers/batch.h"
#include "ops/ops.h"

namespace freshet::eval {

class Evictions {
 public:
  // Errors: the cache has no keys that may be evicted, or the policy evicts nothing after a prompt.
  static Result<std::unique_ptr<Evictions>> make(kv_cache::Retention policy,
                                                 const KvCacheSpec& cache, int sequences);

  // Evicts what is due when the sequence has `length` tokens. blocks[g]: how many it owns in group
  // g, one more than it has tokens for.
  void evict_due(int sequence, int64_t length, const KvStorage& cache,
                 std::span<const int64_t> blocks, ops::Ops& ops);
  int64_t next(int sequence) const { return states_[static_cast<size_t>(sequence)].evict_at; }
  // Tells the batch what its last sequence, whose last `count` tokens it has, has left, and which
  // of these tokens are scored.
  void describe(int sequence, int64_t length, int64_t count, ForwardBatch& batch);
  void reset(int sequence);

  // Bytes that a sequence of `tokens` tokens holds for each of them, given that all layers take
  // part.
  static double bytes_per_token(const kv_cache::RetentionPolicy& policy, const KvCacheSpec& cache,
                                int64_t tokens);

 private:
  struct State {
    int32_t evict_at = kv_cache::kNeverEvicts, scored_from = kv_cache::kNeverEvicts;
    std::vector<int32_t> evicted;              // [groups]
    std::vector<std::vector<int32_t>> coarse;  // [groups][blocks]
    std::shared_ptr<kv_cache::KeyScores> scores;
  };

  Evictions(kv_cache::Retention policy, KvCacheSpec cache, kv_cache::EvictionSchedule schedule,
            int sequences);
  int32_t prompt() const { return policy_->config().budget; }
  int32_t coarse_blocks(size_t group, int32_t tokens) const;

  kv_cache::Retention policy_;
  KvCacheSpec cache_;
  kv_cache::EvictionSchedule schedule_;
  std::vector<State> states_;  // [sequences]
};

}  // namespace freshet::eval

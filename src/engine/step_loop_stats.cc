// StepLoop: what it counts, and the numbers of stats().
#include <algorithm>

#include "engine/step_loop.h"

namespace freshet::engine {

void StepLoop::count_step(int64_t tokens) {
  const auto& bounds = EngineStats::kStepTokens;
  ++counted_.steps;
  counted_.step_tokens += tokens;
  ++counted_.steps_by_tokens[static_cast<size_t>(std::ranges::lower_bound(bounds, tokens) -
                                                 bounds.begin())];
}

// Sounds and pictures whose keys and values of cross-attention were looked for. Pictures that were
// not found count when the tower's cache is asked for them.
void StepLoop::count_encoded(const scheduler::StepItem& item, const LiveRequest& live) {
  const int64_t found = item.encodes ? 0 : 1;
  if (live.pictures && live.pictures->cross_rows > 0)
    counted_.pictures.cached += found * std::ssize(live.request.pictures);
  if (live.request.frames == 0) return;
  ++counted_.encoder.sounds;
  counted_.encoder.sounds_cached += found;
}

void StepLoop::count_evicted_blocks() {
  for (const kv_cache::BlockLife& life : blocks_->lives().take()) {
    counted_.block_lifetime.add(static_cast<double>(life.lifetime) * 1e-6);
    counted_.block_idle.add(static_cast<double>(life.idle) * 1e-6);
    for (const int64_t gap : life.gaps)
      counted_.block_reuse_gap.add(static_cast<double>(gap) * 1e-6);
  }
}

void StepLoop::publish_stats() {
  const scheduler::SchedulerStats s = scheduler_->stats();
  counted_.running = s.running;
  counted_.waiting = s.waiting;
  counted_.preemptions = s.preemptions;
  counted_.kv_evictions = s.evictions;
  counted_.prompt_tokens = s.prompt_tokens;
  counted_.cached_tokens = s.cached_tokens;
  counted_.recomputed_tokens = s.recomputed_tokens;
  counted_.deferred = s.deferred;
  counted_.encoder.queries = s.encoder_queries;
  counted_.encoder.hits = s.encoder_hits;
  counted_.tiers.queries = s.tier_queries;
  counted_.tiers.hits = s.tier_hits;
  counted_.tiers.loading = s.loading;
  if (options_.lengths != nullptr) options_.lengths->publish(counted_.speculation);
  counted_.kv_cache_usage = s.encoder_usage;
  for (int g = 0; g < blocks_->groups(); ++g) {
    const double used = 1.0 - static_cast<double>(blocks_->available(g)) / blocks_->pool(g).size();
    counted_.kv_cache_usage = std::max(counted_.kv_cache_usage, used);
  }
  const std::lock_guard lock(mutex_);
  published_ = counted_;
}

void StepLoop::publish() {
  publish_stats();
  const scheduler::SchedulerStats s = scheduler_->stats();
  const std::lock_guard lock(mutex_);
  queued_requests_ = s.queued_requests;
  queued_tokens_ = s.queued_tokens;
  for (const Arrival& arrival : arrived_) {
    ++queued_requests_;
    queued_tokens_ += static_cast<int64_t>(arrival.request.prompt.size());
  }
}

}  // namespace freshet::engine

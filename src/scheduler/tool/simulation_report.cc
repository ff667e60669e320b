#include "scheduler/simulator.h"

namespace freshet::scheduler {

SimulationReport& SimulationReport::operator+=(const SimulationReport& other) {
  if (failure.empty()) failure = other.failure;
  digest ^= other.digest;
  steps += other.steps;
  requests += other.requests;
  finished += other.finished;
  cancelled += other.cancelled;
  expired += other.expired;
  preemptions += other.preemptions;
  cached_tokens += other.cached_tokens;
  cached_with_states += other.cached_with_states;
  copies += other.copies;
  evictions += other.evictions;
  accepted_drafts += other.accepted_drafts;
  scored_drafts += other.scored_drafts;
  branch_tokens += other.branch_tokens;
  kept_states += other.kept_states;
  refused_while_robbed += other.refused_while_robbed;
  tier_stored += other.tier_stored;
  tier_swapped += other.tier_swapped;
  tier_loaded += other.tier_loaded;
  tier_failed += other.tier_failed;
  tier_hits += other.tier_hits;
  encoder_runs += other.encoder_runs;
  encoder_hits += other.encoder_hits;
  return *this;
}

}  // namespace freshet::scheduler

// Randomised test of the scheduler and the block cache.
//
// A seed decides everything: sizes of pools and windows, policies, arrivals, shared prefixes,
// samples, beams, draft trees, evictions of keys, cancellations, deadlines, a clock that jumps both
// ways, a "thief" that holds blocks so that allocations fail, and in half of the seeds without
// states a tier below the cache (tool/simulated_store.h) with slow and failing loads. The model is
// a hash: slot p of a block holds the hash of the tokens up to p. So every token that runs can
// verify each position that its attention reads, in every group, after copies, evictions and
// preemptions; a state is the hash of all tokens so far. All references are counted after each
// step. Pure function of the seed.
#pragma once

#include <cstdint>
#include <string>

namespace freshet::scheduler {

struct SimulationReport {
  std::string failure;  // empty: no failure
  uint64_t digest = 0;  // hash of all steps
  int64_t steps = 0;
  int64_t requests = 0;
  int64_t finished = 0;
  int64_t cancelled = 0;
  int64_t expired = 0;
  int64_t preemptions = 0;
  int64_t cached_tokens = 0;
  int64_t cached_with_states = 0;  // of those, in models with states
  int64_t kept_states = 0;         // copies for checkpoints and behind drafts
  int64_t copies = 0;
  int64_t evictions = 0;  // of keys of live sequences
  int64_t accepted_drafts = 0;
  int64_t scored_drafts = 0;         // accepted, of sequences whose scores count
  int64_t branch_tokens = 0;         // tokens that came from rows of branches of draft trees
  int64_t refused_while_robbed = 0;  // steps in which nothing could run because of the thief
  // Blocks that went to the tier below the cache (of those, because of a preemption), came back,
  // and failed to; prompt tokens that came from there.
  int64_t tier_stored = 0;
  int64_t tier_swapped = 0;
  int64_t tier_loaded = 0;
  int64_t tier_failed = 0;
  int64_t tier_hits = 0;
  int64_t encoder_runs = 0;  // of requests with an input for an encoder ...
  int64_t encoder_hits = 0;  // ... and those whose output was there

  SimulationReport& operator+=(const SimulationReport& other);
};

SimulationReport simulate(uint64_t seed);

}  // namespace freshet::scheduler

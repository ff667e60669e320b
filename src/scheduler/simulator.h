// Drives the scheduler and the cache through a random life, and looks for anything wrong in it.
//
// A seed decides everything: sizes of pools and windows, policies, arrivals, shared prefixes,
// samples, beams, drafts, cancellations, deadlines, a clock that jumps both ways, and a thief that
// holds blocks so that allocations fail. The model is a hash: slot p of a block holds the hash of
// the tokens up to p, so that running a token can verify that every position its attention reads is
// the right one, in every group, after copies, evictions and preemptions. After each step all
// references are counted. Pure function of the seed.
#pragma once

#include <cstdint>
#include <string>

namespace freshet::scheduler {

struct SimulationReport {
  std::string failure;  // empty: all is well
  uint64_t digest = 0;  // of everything that happened
  int64_t steps = 0;
  int64_t requests = 0;
  int64_t finished = 0;
  int64_t cancelled = 0;
  int64_t expired = 0;
  int64_t preemptions = 0;
  int64_t cached_tokens = 0;
  int64_t copies = 0;
  int64_t accepted_drafts = 0;
  int64_t refused_while_robbed = 0;  // steps in which nothing could run because of the thief

  SimulationReport& operator+=(const SimulationReport& other);
};

SimulationReport simulate(uint64_t seed);

}  // namespace freshet::scheduler

// freshet_simulate [FIRST [COUNT]]: simulates COUNT seeds (100000) from FIRST (1) on; prints those
// that fail, and sums. `freshet_simulate SEED 1` replays one.
#include <cstdlib>

#include <fmt/core.h>

#include "scheduler/simulator.h"

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 100'000;
  freshet::scheduler::SimulationReport total;
  int64_t failed = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const auto report = freshet::scheduler::simulate(seed);
    if (!report.failure.empty() && ++failed <= 20)
      fmt::print("seed {}: {}\n", seed, report.failure);
    total += report;
  }
  fmt::print(
      "{} seeds, {} failed; {} steps, {} requests, {} finished, {} cancelled, {} expired, {} "
      "preemptions, {} cached tokens, {} block copies, {} drafts accepted, {} robbed steps; {} "
      "blocks stored, {} swapped out, {} loaded, {} failed, {} tokens from the tier\n",
      count, failed, total.steps, total.requests, total.finished, total.cancelled, total.expired,
      total.preemptions, total.cached_tokens, total.copies, total.accepted_drafts,
      total.refused_while_robbed, total.tier_stored, total.tier_swapped, total.tier_loaded,
      total.tier_failed, total.tier_hits);
  return failed == 0 ? 0 : 1;
}

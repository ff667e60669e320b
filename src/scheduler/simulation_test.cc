#include <gtest/gtest.h>

#include "scheduler/simulator.h"

namespace freshet::scheduler {
namespace {

TEST(Simulation, BlocksAreConservedAndEverythingEnds) {
  SimulationReport total;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    const SimulationReport report = simulate(seed);
    ASSERT_EQ(report.failure, "") << "replay with: freshet_simulate " << seed << " 1";
    total += report;
  }
  // The slice must have been through all that it is there for.
  EXPECT_GT(total.finished, 10'000);
  EXPECT_GT(total.preemptions, 1'000);
  EXPECT_GT(total.cached_tokens, 10'000);
  EXPECT_GT(total.copies, 1'000);
  EXPECT_GT(total.evictions, 1'000);
  EXPECT_GT(total.accepted_drafts, 1'000);
  EXPECT_GT(total.scored_drafts, 200);
  EXPECT_GT(total.branch_tokens, 250);
  EXPECT_GT(total.cancelled, 500);
  EXPECT_GT(total.expired, 100);
  EXPECT_GT(total.cached_with_states, 3'000);
  EXPECT_GT(total.kept_states, 10'000);
  EXPECT_GT(total.refused_while_robbed, 10);
  EXPECT_GT(total.tier_stored, 10'000);
  EXPECT_GT(total.tier_swapped, 100);
  EXPECT_GT(total.tier_loaded, 1'000);
  EXPECT_GT(total.tier_failed, 50);
  EXPECT_GT(total.tier_hits, 1'000);
  EXPECT_GT(total.encoder_runs, 500);
  EXPECT_GT(total.encoder_hits, 500);
}

TEST(Simulation, ASeedReplays) {
  for (const uint64_t seed : {7, 42, 1234}) EXPECT_EQ(simulate(seed).digest, simulate(seed).digest);
}

}  // namespace
}  // namespace freshet::scheduler

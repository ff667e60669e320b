// How an exit layer is chosen.
#include "speculative/exit_layer.h"

#include <gtest/gtest.h>

namespace freshet::speculative {
namespace {

TEST(ExitLayer, CandidatesAreInTheFirstHalf) {
  EXPECT_EQ(exit_candidates(2), std::vector<int>{1});
  EXPECT_EQ(exit_candidates(8), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(exit_candidates(32), (std::vector<int>{2, 4, 6, 8, 12, 16}));
}

TEST(ExitLayer, GainsFollowTheGeometricSeries) {
  EXPECT_DOUBLE_EQ(exit_gain(0.0, 0.1), 1.0);
  // Two drafts: (1 + a + a^2) / (1 + 2 c) is the most.
  EXPECT_NEAR(exit_gain(0.6, 0.25), 1.96 / 1.5, 1e-12);
  EXPECT_DOUBLE_EQ(exit_gain(1.0, 0.5), 16.0 / 8.5);
  EXPECT_GT(exit_gain(0.8, 0.1), exit_gain(0.8, 0.2));
  EXPECT_GT(exit_gain(0.9, 0.2), exit_gain(0.8, 0.2));
}

}  // namespace
}  // namespace freshet::speculative

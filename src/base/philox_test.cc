#include "base/philox.h"

#include <cmath>
#include <set>

#include <gtest/gtest.h>

namespace freshet {
namespace {

// The known-answer vectors published by Random123 for philox4x32 with ten rounds.
TEST(Philox, EqualsRandom123) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t f = 0xffffffff;
  EXPECT_EQ(philox4x32({f, f, f, f}, {f, f}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformsAreUniformAndDistinct) {
  constexpr int kDraws = 100'000;
  std::array<int, 64> bins{};
  std::set<double> seen;
  double sum = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double u = philox_uniform(42, static_cast<uint64_t>(i), 3);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ++bins[static_cast<size_t>(u * 64)];
    sum += u;
    seen.insert(u);
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(kDraws));
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * std::sqrt(1.0 / 12 / kDraws));
  double chi2 = 0;
  for (int n : bins) chi2 += std::pow(n - kDraws / 64.0, 2) / (kDraws / 64.0);
  EXPECT_LT(chi2, 63 + 6 * std::sqrt(2 * 63.0));
}

TEST(Philox, SeedPositionAndStreamAllMatter) {
  const double base = philox_uniform(1, 2, 3);
  EXPECT_EQ(base, philox_uniform(1, 2, 3));
  EXPECT_NE(base, philox_uniform(2, 2, 3));
  EXPECT_NE(base, philox_uniform(uint64_t{1} << 32 | 1, 2, 3));
  EXPECT_NE(base, philox_uniform(1, uint64_t{1} << 32 | 2, 3));
  EXPECT_NE(base, philox_uniform(1, 2, 4));
}

}  // namespace
}  // namespace freshet

// The choice of options within a budget, against trying every choice.
#include "quantizer/allocation.h"

#include <cmath>
#include <limits>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet::quantizer {
namespace {

using testing::HasSubstr;

std::vector<AllocationItem> random_items(std::mt19937& random, int count, int64_t scale) {
  std::vector<AllocationItem> items(static_cast<size_t>(count));
  for (AllocationItem& item : items) {
    const int options = 1 + static_cast<int>(random() % 5);
    for (int k = 0; k < options; ++k)
      item.push_back({static_cast<int64_t>(1 + random() % 40) * scale,
                      static_cast<double>(random() % 1000) / 7.0});
  }
  return items;
}

double by_trying_all(const std::vector<AllocationItem>& items, size_t from, int64_t budget) {
  if (budget < 0) return std::numeric_limits<double>::infinity();
  if (from == items.size()) return 0;
  double best = std::numeric_limits<double>::infinity();
  for (const AllocationOption& o : items[from])
    best = std::min(best, o.loss + by_trying_all(items, from + 1, budget - o.bytes));
  return best;
}

TEST(AllocationTest, IsTheBestOfAllChoices) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t scale = trial % 2 == 0 ? 1 : 96;
    const auto items = random_items(random, 1 + trial % 6, scale);
    const int64_t budget = static_cast<int64_t>(random() % 200) * scale + trial % 3;
    const double want = by_trying_all(items, 0, budget);
    const auto got = allocate(items, budget);
    ASSERT_EQ(got.ok(), std::isfinite(want)) << trial;
    if (!got.ok()) {
      EXPECT_THAT(got.status().message(), HasSubstr("too small"));
      continue;
    }
    EXPECT_LE(got->bytes, budget);
    EXPECT_NEAR(got->loss, want, 1e-9) << trial;
  }
}

// Sizes without a common divisor and more units than the search has.
TEST(AllocationTest, CoarseUnitsStayWithinTheBudgetAndNearTheOptimum) {
  std::mt19937 random(11);
  int solved = 0;
  for (int trial = 0; trial < 20; ++trial) {
    auto items = random_items(random, 6, 1000003);
    for (AllocationItem& item : items) {
      for (AllocationOption& o : item) o.bytes += static_cast<int64_t>(random() % 1000);
    }
    const int64_t budget = 160 * 1000003 + 17;
    const double want = by_trying_all(items, 0, budget);
    const auto got = allocate(items, budget);
    ASSERT_EQ(got.ok(), std::isfinite(want));
    if (!got.ok()) continue;
    ++solved;
    EXPECT_LE(got->bytes, budget);
    EXPECT_LE(got->loss, want * 1.01 + 1e-9) << trial;
  }
  EXPECT_GE(solved, 10);
}

TEST(AllocationTest, IsNeverWorseThanAKnownChoice) {
  // Only the known choice uses the budget to the last byte; rounding to units would lose it.
  const int64_t big = int64_t{1} << 40;
  std::vector<AllocationItem> items;
  std::vector<int> known;
  int64_t budget = 0;
  for (int i = 0; i < 50; ++i) {
    items.push_back({{big, 10.0}, {big + (big >> 3) + i, 5.0}, {2 * big + 1, 4.9}});
    known.push_back(i % 2);
    budget += items.back()[static_cast<size_t>(i % 2)].bytes;
  }
  const std::vector<std::vector<int>> all_known = {known};
  const auto got = allocate(items, budget, all_known);
  ASSERT_TRUE(got.ok());
  EXPECT_LE(got->bytes, budget);
  EXPECT_LE(got->loss, 25 * 15.0);
  EXPECT_LE(allocate(items, budget - 1, all_known)->bytes, budget - 1);
}

}  // namespace
}  // namespace freshet::quantizer

// Against closed forms and published tables.
#include "eval/statistics.h"

#include <cmath>

#include <gtest/gtest.h>

namespace freshet::eval {
namespace {

Blocks single_tokens(std::initializer_list<double> values) {
  Blocks blocks;
  for (const double v : values) blocks.add(v, 1.0);
  return blocks;
}

TEST(Statistics, MeanAndErrorUseTheSampleVariance) {
  const MeanAndError m = mean_and_error(single_tokens({2, 4, 4, 4, 5, 5, 7, 9}));
  EXPECT_DOUBLE_EQ(m.mean, 5.0);
  EXPECT_NEAR(m.standard_error, std::sqrt(32.0 / 7.0 / 8.0), 1e-15);
  EXPECT_EQ(mean_and_error(single_tokens({3})).standard_error, 0.0);
}

TEST(Statistics, BlocksCountByTheirTokens) {
  Blocks blocks;  // 10 tokens of 1 and 20 of 2.5 in all
  blocks.add(10.0, 10.0);
  blocks.add(50.0, 20.0);
  const MeanAndError m = mean_and_error(blocks);
  EXPECT_DOUBLE_EQ(m.mean, 2.0);
  // Residuals -10 and 10: sqrt(200 * 2 / 1) / 30.
  EXPECT_NEAR(m.standard_error, 20.0 / 30.0, 1e-15);
  const Interval i = bootstrap_mean(blocks);
  EXPECT_DOUBLE_EQ(i.low, 1.0);
  EXPECT_DOUBLE_EQ(i.high, 2.5);
}

TEST(Statistics, PercentilesInterpolateAsNumpyDoes) {
  const double values[] = {1, 2, 4, 8};  // numpy.percentile(values, [0, 50, 99, 100])
  EXPECT_DOUBLE_EQ(percentile(values, 0.0), 1.0);
  EXPECT_DOUBLE_EQ(percentile(values, 0.5), 3.0);
  EXPECT_NEAR(percentile(values, 0.99), 7.88, 1e-12);
  EXPECT_DOUBLE_EQ(percentile(values, 1.0), 8.0);
  EXPECT_DOUBLE_EQ(percentile(std::span(values, 1), 0.3), 1.0);
}

TEST(Statistics, WilsonIntervals) {
  // Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
  const auto expect = [](int64_t successes, int64_t trials, double low, double high) {
    const Interval i = wilson(successes, trials);
    EXPECT_NEAR(i.low, low, 5e-5) << successes;
    EXPECT_NEAR(i.high, high, 5e-5) << successes;
  };
  expect(81, 263, 0.2553, 0.3662);
  expect(15, 148, 0.0624, 0.1605);
  expect(0, 20, 0.0, 0.1611);
  expect(1, 29, 0.0061, 0.1718);
}

TEST(Statistics, McNemarIsABinomialTest) {
  EXPECT_DOUBLE_EQ(mcnemar_exact(0, 0), 1.0);
  EXPECT_DOUBLE_EQ(mcnemar_exact(4, 4), 1.0);
  EXPECT_NEAR(mcnemar_exact(0, 5), 2.0 / 32.0, 1e-15);
  EXPECT_NEAR(mcnemar_exact(1, 9), 22.0 / 1024.0, 1e-15);
  EXPECT_NEAR(mcnemar_exact(9, 1), 22.0 / 1024.0, 1e-15);
  // sum of C(100, k), k <= 40, over 2^99.
  EXPECT_NEAR(mcnemar_exact(60, 40), 0.05688793364098078, 1e-12);
  EXPECT_NEAR(mcnemar_exact(10000, 10000), 1.0, 1e-9);
}

TEST(Statistics, MinimumDetectableDifference) {
  // arXiv:2605.28873: a tenth of the items discordant; in points, to their precision.
  EXPECT_NEAR(100.0 * minimum_detectable_difference(100, 1000), 2.80, 0.005);
  EXPECT_NEAR(100.0 * minimum_detectable_difference(1000, 10000), 0.886, 0.0005);
  EXPECT_EQ(minimum_detectable_difference(0, 100), minimum_detectable_difference(1, 100));
}

TEST(Statistics, BootstrapIsDeterministicAndCoversTheMean) {
  Blocks blocks;
  for (int i = 0; i < 200; ++i) blocks.add(std::sin(i * 12.9898) * 3.0 + 1.0, 1.0);
  const MeanAndError m = mean_and_error(blocks);
  const Interval a = bootstrap_mean(blocks), b = bootstrap_mean(blocks);
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
  // With 200 blocks it agrees with the normal interval.
  EXPECT_NEAR(a.low, m.mean - 1.96 * m.standard_error, 0.1 * m.standard_error);
  EXPECT_NEAR(a.high, m.mean + 1.96 * m.standard_error, 0.1 * m.standard_error);
  EXPECT_NE(bootstrap_mean(blocks, 10000, 1).low, a.low);
  EXPECT_EQ(bootstrap_mean(single_tokens({0.5})).low, 0.5);
}

}  // namespace
}  // namespace freshet::eval

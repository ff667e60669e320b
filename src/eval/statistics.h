// Statistics of paired comparisons: intervals, tests and percentiles.
//
// Pure functions in double precision; random numbers come from a fixed seed, so equal input gives
// equal output. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace freshet::eval {

struct Interval {
  double low = 0.0;
  double high = 0.0;
};

// A mean per token over blocks of tokens that are correlated, such as windows of a text: block b
// has counts[b] tokens, whose values add up to sums[b].
struct Blocks {
  std::vector<double> sums, counts;
  void add(double sum, double count) {
    sums.push_back(sum);
    counts.push_back(count);
  }
};

struct MeanAndError {
  double mean = 0.0;
  double standard_error = 0.0;  // of the mean; 0 for a single block
};
// The error is that of a ratio of sums, from the sample variance over blocks. For blocks of equal
// size it is the standard error of their means. REQUIRES: not empty, counts above 0.
MeanAndError mean_and_error(const Blocks& blocks);

// `share` in [0, 1] of the sorted values, with linear interpolation between neighbours (numpy's
// default). REQUIRES: not empty.
double percentile(std::span<const double> sorted, double share);

// 95 % percentile interval of the mean, from `resamples` draws of whole blocks with replacement.
// REQUIRES: as above.
Interval bootstrap_mean(const Blocks& blocks, int resamples = 10000, uint64_t seed = 0);

// 95 % score interval of a share (Wilson 1927). REQUIRES: 0 <= successes <= trials, trials > 0.
Interval wilson(int64_t successes, int64_t trials);

// McNemar's exact test: the two-sided probability that fair coins split the discordant pairs at
// least as unevenly. 1 if there are none.
double mcnemar_exact(int64_t only_first, int64_t only_second);

// The smallest difference between two accuracies on the same `items` that a two-sided test at 5 %
// finds with a probability of 80 %: (z_0.975 + z_0.8) * sqrt(share of discordant items / items).
// Without discordant items, the share counts as one item. REQUIRES: items > 0.
double minimum_detectable_difference(int64_t discordant, int64_t items);

}  // namespace freshet::eval

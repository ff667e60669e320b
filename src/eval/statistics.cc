#include "eval/statistics.h"

#include <algorithm>
#include <cmath>

#include "base/philox.h"
#include "base/status.h"

namespace freshet::eval {
namespace {

constexpr double kNormal975 = 1.959963984540054;  // quantiles of the normal distribution
constexpr double kNormal80 = 0.8416212335729143;

}  // namespace

MeanAndError mean_and_error(const Blocks& blocks) {
  const auto blocks_count = static_cast<double>(blocks.sums.size());
  double sum = 0.0, tokens = 0.0;
  for (const double s : blocks.sums) sum += s;
  for (const double n : blocks.counts) tokens += n;
  FRESHET_CHECK(tokens > 0.0);
  MeanAndError result{sum / tokens, 0.0};
  if (blocks.sums.size() < 2) return result;
  double squares = 0.0;
  for (size_t b = 0; b < blocks.sums.size(); ++b) {
    const double residual = blocks.sums[b] - result.mean * blocks.counts[b];
    squares += residual * residual;
  }
  result.standard_error = std::sqrt(squares * blocks_count / (blocks_count - 1.0)) / tokens;
  return result;
}

double percentile(std::span<const double> sorted, double share) {
  FRESHET_CHECK(!sorted.empty() && share >= 0.0 && share <= 1.0);
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (place - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Interval bootstrap_mean(const Blocks& blocks, int resamples, uint64_t seed) {
  FRESHET_CHECK(!blocks.sums.empty() && resamples > 0);
  const uint64_t count = blocks.sums.size();
  std::vector<double> means(static_cast<size_t>(resamples));
  for (size_t r = 0; r < means.size(); ++r) {
    double sum = 0.0, tokens = 0.0;
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t bits = philox_bits(seed, r * count + i, 0) >> 32;
      const size_t block = bits * count >> 32;
      sum += blocks.sums[block];
      tokens += blocks.counts[block];
    }
    means[r] = sum / tokens;
  }
  std::ranges::sort(means);
  return {percentile(means, 0.025), percentile(means, 0.975)};
}

Interval wilson(int64_t successes, int64_t trials) {
  FRESHET_CHECK(trials > 0 && successes >= 0 && successes <= trials);
  const auto n = static_cast<double>(trials);
  const double share = static_cast<double>(successes) / n;
  const double z2 = kNormal975 * kNormal975;
  const double centre = share + z2 / (2.0 * n);
  const double half = kNormal975 * std::sqrt(share * (1.0 - share) / n + z2 / (4.0 * n * n));
  return {std::max(0.0, (centre - half) / (1.0 + z2 / n)),
          std::min(1.0, (centre + half) / (1.0 + z2 / n))};
}

double mcnemar_exact(int64_t only_first, int64_t only_second) {
  const int64_t n = only_first + only_second;
  const int64_t fewer = std::min(only_first, only_second);
  FRESHET_CHECK(fewer >= 0);
  double tail = 0.0;
  double log_term = -static_cast<double>(n) * std::log(2.0);  // of C(n, k) / 2^n
  for (int64_t k = 0; k <= fewer; ++k) {
    tail += std::exp(log_term);
    log_term += std::log(static_cast<double>(n - k) / static_cast<double>(k + 1));
  }
  return std::min(1.0, 2.0 * tail);
}

double minimum_detectable_difference(int64_t discordant, int64_t items) {
  FRESHET_CHECK(items > 0 && discordant <= items);
  const auto m = static_cast<double>(items);
  const double share = static_cast<double>(std::max<int64_t>(discordant, 1)) / m;
  return (kNormal975 + kNormal80) * std::sqrt(share / m);
}

}  // namespace freshet::eval

#include "bench_client/stats.h"

#include <algorithm>
#include <cmath>

namespace freshet::bench_client {

double mean(std::span<const double> values) {
  if (values.empty()) return 0.0;
  // Kahan summation: a million small latencies must not be rounded away in their total.
  double sum = 0.0;
  double lost = 0.0;
  for (const double v : values) {
    const double term = v - lost;
    const double next = sum + term;
    lost = (next - sum) - term;
    sum = next;
  }
  return sum / static_cast<double>(values.size());
}

double standard_deviation(std::span<const double> values) {
  if (values.empty()) return 0.0;
  const double centre = mean(values);
  std::vector<double> squares;
  squares.reserve(values.size());
  for (const double v : values) squares.push_back((v - centre) * (v - centre));
  return std::sqrt(mean(squares));
}

double percentile(std::span<const double> sorted, double percent) {
  if (sorted.empty()) return 0.0;
  const double at = percent / 100.0 * static_cast<double>(sorted.size() - 1);
  const size_t below = std::min(static_cast<size_t>(at), sorted.size() - 1);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], at - static_cast<double>(below));
}

Summary summarise(std::vector<double> values, std::span<const double> percents) {
  std::sort(values.begin(), values.end());
  Summary s;
  s.mean = mean(values);
  s.median = percentile(values, 50.0);
  s.standard_deviation = standard_deviation(values);
  for (const double p : percents) s.percentiles.emplace_back(p, percentile(values, p));
  return s;
}

}  // namespace freshet::bench_client

// Statistics as NumPy defines them: population standard deviation, percentiles by linear
// interpolation. For an empty input every value is 0, as in
// vLLM's reports. Pure functions.
#pragma once

#include <span>
#include <utility>
#include <vector>

namespace freshet::bench_client {

double mean(std::span<const double> values);
double standard_deviation(std::span<const double> values);
// REQUIRES: `sorted` ascends, 0 <= percent <= 100.
double percentile(std::span<const double> sorted, double percent);

struct Summary {
  double mean = 0.0;
  double median = 0.0;
  double standard_deviation = 0.0;
  std::vector<std::pair<double, double>> percentiles;  // percent, value
};
Summary summarise(std::vector<double> values, std::span<const double> percents);

}  // namespace freshet::bench_client

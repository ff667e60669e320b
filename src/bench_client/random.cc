#include "bench_client/random.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace freshet::bench_client {

uint64_t Random::below(uint64_t n) {
  return std::min(static_cast<uint64_t>(uniform() * static_cast<double>(n)), n - 1);
}

int64_t Random::between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(below(static_cast<uint64_t>(high - low) + 1));
}

double Random::normal() {
  // Box and Muller; 1 - u keeps the logarithm finite.
  const double radius = std::sqrt(-2.0 * std::log1p(-uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

// Marsaglia and Tsang, "A simple method for generating gamma variables" (TOMS 2000).
double Random::gamma(double shape, double scale) {
  if (shape < 1.0) {
    const double boost = std::pow(1.0 - uniform(), 1.0 / shape);
    return gamma(shape + 1.0, scale) * boost;
  }
  const double d = shape - 1.0 / 3.0;
  const double c = 1.0 / std::sqrt(9.0 * d);
  for (;;) {
    const double x = normal();
    const double v = std::pow(1.0 + c * x, 3.0);
    if (v <= 0.0) continue;
    if (std::log(1.0 - uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v * scale;
  }
}

}  // namespace freshet::bench_client

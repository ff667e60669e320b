#include "bench_client/arrivals.h"

#include <algorithm>
#include <cmath>

#include "bench_client/random.h"

namespace freshet::bench_client {
namespace {

double rate_of(size_t index, size_t count, const ArrivalOptions& o) {
  const double progress =
      static_cast<double>(index) / static_cast<double>(std::max<size_t>(count, 2) - 1);
  switch (o.ramp_up) {
    case RampUp::kNone:
      return o.rate;
    case RampUp::kLinear:
      return o.start_rate + (o.end_rate - o.start_rate) * progress;
    case RampUp::kExponential:
      return o.start_rate * std::pow(o.end_rate / o.start_rate, progress);
  }
  return o.rate;
}

}  // namespace

Status check(const ArrivalOptions& o) {
  if (!(o.burstiness > 0.0))
    return invalid_argument("--burstiness {}: must be greater than 0", o.burstiness);
  if (o.ramp_up == RampUp::kNone) {
    if (!(o.rate > 0.0))
      return invalid_argument("--request-rate {}: must be greater than 0", o.rate);
    return {};
  }
  if (!std::isinf(o.rate))
    return invalid_argument("give either --request-rate or --ramp-up-strategy");
  if (!(o.start_rate > 0.0) || !(o.end_rate >= o.start_rate) || std::isinf(o.end_rate)) {
    return invalid_argument(
        "--ramp-up-start-rps {} --ramp-up-end-rps {}: must be greater than 0 and must not decrease",
        o.start_rate, o.end_rate);
  }
  return {};
}

std::vector<double> arrival_times(size_t count, const ArrivalOptions& o) {
  std::vector<double> times(count, 0.0);
  if (o.ramp_up == RampUp::kNone && std::isinf(o.rate)) return times;
  Random random(o.seed, Stream::kArrivals);
  double now = 0.0;
  for (size_t i = 0; i < count; ++i) {
    const double rate = rate_of(i, count, o);
    now += std::isinf(o.burstiness) ? 1.0 / rate
                                    : random.gamma(o.burstiness, 1.0 / (rate * o.burstiness));
    times[i] = now;
  }
  if (o.ramp_up == RampUp::kNone && now > 0.0) {
    const double scale = static_cast<double>(count) / o.rate / now;
    for (double& t : times) t *= scale;
  }
  return times;
}

}  // namespace freshet::bench_client

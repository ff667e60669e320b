// Arrival times of requests: a renewal process whose gaps follow a gamma distribution.
//
// Burstiness is the shape of the gamma distribution, as in vLLM: 1 is a Poisson process, below 1 is
// burstier, above 1 is steadier, infinity gives constant gaps. At a fixed rate the times are scaled
// so that the last one is exactly count / rate: this keeps the throughput of different seeds
// comparable. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/status.h"

namespace freshet::bench_client {

enum class RampUp { kNone, kLinear, kExponential };

struct ArrivalOptions {
  double rate =
      std::numeric_limits<double>::infinity();  // requests per second; infinite: all at once
  double burstiness = 1.0;
  RampUp ramp_up = RampUp::kNone;  // from start_rate to end_rate over the run, instead of `rate`
  double start_rate = 0.0;
  double end_rate = 0.0;
  uint64_t seed = 0;
};

Status check(const ArrivalOptions& options);

// Seconds since the start, ascending. REQUIRES: check() is ok.
std::vector<double> arrival_times(size_t count, const ArrivalOptions& options);

}  // namespace freshet::bench_client

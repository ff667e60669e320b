// When requests are sent: a renewal process whose gaps follow a gamma distribution.
//
// Burstiness is the gamma's shape, as in vLLM: 1 is a Poisson process, less comes in bursts, more
// is steadier, infinity is a metronome. At a fixed rate the times are scaled so that the last is
// exactly count / rate, which keeps the throughput of different seeds comparable. Pure functions.
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
      std::numeric_limits<double>::infinity();  // requests a second; infinite: all at once
  double burstiness = 1.0;
  RampUp ramp_up = RampUp::kNone;  // from start_rate to end_rate over the run, instead of `rate`
  double start_rate = 0.0;
  double end_rate = 0.0;
  uint64_t seed = 0;
};

Status check(const ArrivalOptions& options);

// Seconds after the start, ascending. REQUIRES: check() is ok.
std::vector<double> arrival_times(size_t count, const ArrivalOptions& options);

}  // namespace freshet::bench_client

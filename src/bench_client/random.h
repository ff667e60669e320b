// Random draws for workloads, from Philox: the same seed and stream give the same draws on every
// machine. Not synchronised.
#pragma once

#include <cstdint>

#include "base/philox.h"

namespace freshet::bench_client {

// A stream per purpose, so that draws for one do not change the others.
enum class Stream : uint32_t { kArrivals = 1, kLengths, kTokens, kOrder, kPrefix, kBlocks };

class Random {
 public:
  Random(uint64_t seed, Stream stream) : seed_(seed), stream_(static_cast<uint32_t>(stream)) {}

  double uniform() { return philox_uniform(seed_, position_++, stream_); }  // [0, 1)
  uint64_t below(uint64_t n);                                               // REQUIRES: n > 0
  int64_t between(int64_t low, int64_t high);  // both included; REQUIRES: low <= high
  double normal();
  double gamma(double shape, double scale);  // REQUIRES: shape > 0

 private:
  uint64_t seed_;
  uint32_t stream_;
  uint64_t position_ = 0;
};

}  // namespace freshet::bench_client

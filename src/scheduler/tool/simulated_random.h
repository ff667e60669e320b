// Random numbers and hashes of the simulator: functions of the seed alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/philox.h"

namespace freshet::scheduler {

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline uint64_t extend(uint64_t hash, int32_t token) {
  return mix(hash + 0x9E3779B97F4A7C15 + static_cast<uint64_t>(static_cast<uint32_t>(token)));
}

class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  // In [low, high].
  int32_t in(int32_t low, int32_t high) {
    const double u = philox_uniform(seed_, next_++, 0);
    return low + static_cast<int32_t>(u * (static_cast<double>(high) - low + 1));
  }
  bool chance(int32_t percent) { return in(1, 100) <= percent; }
  template <class T, size_t N>
  T one_of(const T (&values)[N]) {
    return values[in(0, static_cast<int32_t>(N) - 1)];
  }

 private:
  uint64_t seed_;
  uint64_t next_ = 0;
};

}  // namespace freshet::scheduler

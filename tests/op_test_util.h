// Shared parts of the conformance tests: random data, guarded memory, and a device for a forced
// row.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "ops/ops.h"

namespace freshet::test {

inline std::vector<float> random_floats(size_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

// Bytes between two guard regions that detect stray writes; aligned to 64.
class Guarded {
 public:
  explicit Guarded(size_t bytes, uint8_t fill = 0xff) : bytes_(bytes) {
    FRESHET_CHECK(bytes < size_t{1} << 40);
    memory_.assign(bytes + 2 * kWall + 64, kMark);
    const auto at = reinterpret_cast<uintptr_t>(memory_.data()) + kWall;
    data_ = memory_.data() + kWall + ((64 - at % 64) % 64);
    std::fill_n(data_, bytes, fill);
  }
  ~Guarded() { check(); }
  void check() const {
    for (const uint8_t* p = memory_.data(); p < data_; ++p) ASSERT_EQ(*p, kMark) << "before";
    for (const uint8_t* p = data_ + bytes_; p < memory_.data() + memory_.size(); ++p) {
      ASSERT_EQ(*p, kMark) << "after, at byte " << p - data_;
    }
  }
  uint8_t* data() { return data_; }
  float* floats() { return reinterpret_cast<float*>(data_); }

 private:
  static constexpr size_t kWall = 256;
  static constexpr uint8_t kMark = 0xa5;
  size_t bytes_;
  std::vector<uint8_t> memory_;
  uint8_t* data_;
};

inline const ops::Capabilities& machine() {
  static const ops::Capabilities kMachine = cpu::detect();
  return kMachine;
}

inline std::unique_ptr<ops::Ops> make_ops(ThreadPool& pool, const std::string& forced,
                                          size_t scratch_bytes = 0) {
  ops::OpsOptions options;
  options.scratch_bytes = scratch_bytes;
  if (!forced.empty()) options.force_kernels = {forced};
  return std::move(ops::Ops::create(pool, cpu::kernels(), machine(), options)).value();
}

}  // namespace freshet::test

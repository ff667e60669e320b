// The numbers of a planned tensor, read from the checkpoint in the order in which they are written.
//
// Holds the numbers of one tensor; pages of the checkpoint are released when they were read. Every
// number is checked: a NaN or an infinity is an error that names the tensor. Used by one thread,
// reads on all threads of the pool.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "quantizer/export_plan.h"

namespace freshet::quantizer {

class PlannedReader {
 public:
  explicit PlannedReader(ThreadPool& pool) : pool_(pool) {}

  // [rows, cols]; valid until the next call.
  Result<std::span<const float>> read(const Planned& p);
  // The same for some rows, in the order of `rows`.
  Result<std::span<const float>> read_rows(const Planned& p, std::span<const int64_t> rows);

 private:
  Status gather(const Planned& p);
  Status finish(const Planned& p, int64_t rows);

  ThreadPool& pool_;
  std::vector<float> numbers_;
};

}  // namespace freshet::quantizer

// What the processor can do at most, measured: reading memory and each kind of arithmetic that the
// kernels of this room use. All workers of a pool run the same loop at the same time; the best of a
// few short runs counts. About a second in all. Call from the thread that owns the pool, with
// nothing else running on it. Machines are shared: compare only within one run.
#pragma once

#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "ops/kernel_table.h"

namespace freshet::cpu {

struct Ceiling {
  std::string_view name;  // "read", "l2", "amx bf16" ...
  std::string_view unit;  // "B/s", or "op/s": multiplications and additions
  double rate = 0.0;
};

// Every ceiling that `can` allows to measure.
std::vector<Ceiling> measure_ceilings(ThreadPool& pool, const ops::Capabilities& can);

// Bytes a second from memory, the best of several ways to read.
double measure_read(ThreadPool& pool);

// The arithmetic that a row of the table is bound by, and its rate.
Ceiling measure_arithmetic(ThreadPool& pool, const ops::MatmulKernel& kernel);

}  // namespace freshet::cpu

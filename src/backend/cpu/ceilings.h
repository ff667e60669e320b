// Measures the processor's limits: memory reads, and each kind of arithmetic that the CPU kernels
// use. All workers of a pool run the same loop at the same time; the best of a few short runs
// counts. Takes about a second in total. Call it from the thread that owns the pool, while nothing
// else runs on the pool. Machines are shared: compare only within one run.
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

// Measures every limit that `can` allows.
std::vector<Ceiling> measure_ceilings(ThreadPool& pool, const ops::Capabilities& can);

// Bytes per second from memory, the best of several access patterns.
double measure_read(ThreadPool& pool);

// The arithmetic that limits a row of the table, and its rate.
Ceiling measure_arithmetic(ThreadPool& pool, const ops::MatmulKernel& kernel);

}  // namespace freshet::cpu

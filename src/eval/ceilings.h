// Measures the limits of this machine, which `freshet bench` compares with.
//
// Measurements take up to a second and use all the threads given. Machines are shared: compare only
// within one run.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "layers/model.h"

namespace freshet::eval {

struct Ceilings {
  double read = 0.0;        // bytes a second from memory
  double operations = 0.0;  // multiplications and additions a second; 0: not known for this model
  std::string operations_name;  // which arithmetic, e.g. "avx2 int8"
};

// The read rate, and the rate of the arithmetic that most of the model's weights are computed in.
Ceilings measure_ceilings(const Model& model, int threads);

struct Ceiling {
  std::string name;  // "read", "l2", "amx int8" ...
  std::string unit;  // "B/s" or "op/s"
  double rate = 0.0;
};
// All limits of the processor up to `cpu_isa` ("": any); threads as ThreadPool takes them.
Result<std::vector<Ceiling>> measure_all_ceilings(int threads, const std::string& cpu_isa);

}  // namespace freshet::eval

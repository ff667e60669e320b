// Which problems gemm_q_sm90_m9_16.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_q_sm90_m9_16_large_n.h"
#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline bool supports_q_m9_16(const DeviceLimits&, const GemmProblem& p) {
  return eight_slices(p);
}
inline bool supports_q_pair_m9_16(const DeviceLimits& limits, const GemmProblem& p) {
  return second_format(p) > 0 && eight_slices(p) && !fills_warps(limits, p);
}

}  // namespace freshet::cuda

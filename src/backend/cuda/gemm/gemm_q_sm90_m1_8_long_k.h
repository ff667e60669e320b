// Which problems gemm_q_sm90_m1_8_long_k.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline bool supports_q_m1_8_long_k(const DeviceLimits& limits, const GemmProblem& p) {
  const GemmWeight& w = p.of[0];
  return p.count == 1 && w.rows % 16 == 0 && w.rows <= 32 * limits.multiprocessors &&
         w.cols >= 4096;
}

}  // namespace freshet::cuda

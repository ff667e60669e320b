// Which problems gemm_q_sm90_m1_8.cu supports with a SwiGLU epilogue; without one it supports all.
// Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline bool supports_swiglu_q_m1_8(const DeviceLimits&, const GemmProblem& p) {
  return whole_lines(p);
}

}  // namespace freshet::cuda

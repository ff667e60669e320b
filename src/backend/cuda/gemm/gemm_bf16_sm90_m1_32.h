// Which problems gemm_bf16_sm90_m1_32.cu and swiglu_bf16_sm90_m17_32.cu support. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline bool supports_bf16_m1_32(const DeviceLimits&, const GemmProblem& p) {
  return eight_slices(p);
}
inline bool supports_swiglu_bf16_m1_32(const DeviceLimits&, const GemmProblem& p) {
  return whole_lines(p) && eight_slices(p);
}

}  // namespace freshet::cuda

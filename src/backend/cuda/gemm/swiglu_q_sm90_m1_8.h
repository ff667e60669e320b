// Which problems swiglu_q_sm90_m1_8.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// Also used by prefetch_next_gemm.cu.
inline bool swiglu_large_n_takes(const DeviceLimits& limits, int64_t rows, int64_t cols) {
  return leaves(cols) == kKSlices && rows % 16 == 0 && rows >= 2 * 16 * limits.multiprocessors;
}
inline bool supports_swiglu_q_m1_8_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return whole_lines(p) && swiglu_large_n_takes(limits, p.of[0].rows, first_cols(p));
}
inline bool supports_q_m1_8_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  const GemmWeight& w = p.of[0];
  return p.count == 1 && eight_slices(p) && w.rows % 32 == 0 &&
         w.rows >= 4 * 16 * limits.multiprocessors;
}

}  // namespace freshet::cuda

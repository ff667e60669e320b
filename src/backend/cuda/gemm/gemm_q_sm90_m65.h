// Which problems gemm_q_sm90_m65.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_q_sm90_m17_64.h"
#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// Blocks of 128 rows and 64 tokens, if larger blocks would make less than a wave or two waves.
inline bool supports_q_m65_half_tokens(const DeviceLimits& limits, const GemmProblem& p) {
  return 2 * blocks_of(p, 128) * div_up(p.tokens, 128) <= limits.multiprocessors;
}
inline bool supports_q_m65_splitk4(const DeviceLimits& limits, const GemmProblem& p) {
  if (leaves(first_cols(p)) < 4) return false;
  const int64_t pairs = split_blocks(p, 64) * div_up(p.tokens, 128);
  return pairs <= limits.multiprocessors ||
         (pairs <= 2 * limits.multiprocessors && !supports_q_m65_half_tokens(limits, p));
}
inline bool supports_swiglu_q_m65(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_fills(limits, p, 128);
}

}  // namespace freshet::cuda

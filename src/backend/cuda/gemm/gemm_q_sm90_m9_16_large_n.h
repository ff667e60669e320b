// Which problems gemm_q_sm90_m9_16_large_n.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline constexpr int kWideTiles = 2;  // 16-row tiles of a warp at a time

// With fewer tiles some warps would have no work.
inline bool fills_warps(const DeviceLimits& limits, const GemmProblem& p) {
  return even_share(limits, p) > kRowWarps * kWideTiles * 3 / 4;
}
inline bool supports_q_m9_16_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return eight_slices(p) && fills_warps(limits, p);
}
inline bool supports_swiglu_q_m9_16(const DeviceLimits& limits, const GemmProblem& p) {
  return whole_lines(p) && eight_slices(p) && even_share(limits, only_gate(p, 1)) > kRowWarps / 2;
}

}  // namespace freshet::cuda

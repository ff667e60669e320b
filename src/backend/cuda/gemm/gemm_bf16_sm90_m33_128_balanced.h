// Which problems gemm_bf16_sm90_m33_128_balanced.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline constexpr int kBalancedTiles = 4;  // 16-row tiles per block, for more than 64 tokens

inline bool supports_bf16_m33_128_balanced(const DeviceLimits& limits, const GemmProblem& p) {
  return p.tokens <= 64 || even_share(limits, p) <= kBalancedTiles;
}

}  // namespace freshet::cuda

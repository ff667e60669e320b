// Which problems gemm_bf16_sm90_m33_128_splitk2.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline bool supports_bf16_m33_128_splitk2(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int64_t kMostTiles = 6;  // 16-row tiles per pair of blocks
  return eight_slices(p) && div_up(blocks_of(p, 16), limits.multiprocessors / 2) <= kMostTiles;
}

}  // namespace freshet::cuda

// Which problems swiglu_fp8_sm90_m1_64.cu and swiglu_fp8_sm90_m65.cu support. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline constexpr int64_t kFp8GateRows = 128;  // rows of gate, and of up, per tile

// Whole scale groups of features, and at least two thirds of the SMs have work until the end.
inline bool supports_swiglu_fp8(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int64_t kTileTokens = 128;
  const int64_t rows = p.of[0].rows, most = limits.multiprocessors;
  const int64_t tiles =
      div_up(rows, kFp8GateRows) * (p.tokens <= 64 ? 1 : div_up(p.tokens, kTileTokens));
  return rows % kFp8GateRows == 0 && whole_in_k(rows) &&
         tiles * 3 >= div_up(tiles, most) * most * 2;
}

}  // namespace freshet::cuda

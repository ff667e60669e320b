// Which problems swiglu_bf16_sm90_m65_128.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline constexpr int64_t kPassTiles = 7;  // 16-row tiles of gate, and of up, per pass over K

inline bool supports_swiglu_bf16_m65_128(const DeviceLimits& limits, const GemmProblem& p) {
  const int share = even_share(limits, only_gate(p, 64));
  return share * 4 > div_up(share, kPassTiles) * kPassTiles * 3;
}

}  // namespace freshet::cuda

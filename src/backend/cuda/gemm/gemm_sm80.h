// Which problems gemm_sm80_small_m.cu and gemm_sm80_large_m.cu support. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// On Hopper, block formats and FP8 have kernels of their own. This kernel isn't compiled for them,
// except for block formats with 9 to 16 tokens and short K.
inline bool supports_sm80_small_m(const DeviceLimits& limits, const GemmProblem& p) {
  if (limits.capability != 90 || p.of[0].code == Code::kF16) return true;
  if (p.of[0].code == Code::kFP8) return false;
  return p.of[0].code == Code::kBF16 ? p.tokens <= 32 : p.tokens > 8 && p.tokens <= 16;
}
inline bool supports_sm80_large_m(const DeviceLimits& limits, const GemmProblem& p) {
  const uint64_t format = bit(p.of[0].code);
  return limits.capability != 90 || (format & (bit(Code::kF16) | bit(Code::kBF16))) != 0;
}

}  // namespace freshet::cuda

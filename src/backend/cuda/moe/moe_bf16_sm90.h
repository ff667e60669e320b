// Which problems moe_bf16_sm90_wgmma.cu and moe_bf16_sm90_large_m.cu support. Plain C++.
#pragma once

#include "backend/cuda/moe/moe_rows.h"

namespace freshet::cuda {

inline bool supports_moe_bf16(const DeviceLimits&, const MoeProblem& p) {
  return p.down == Code::kBF16 && p.ff % 64 == 0;
}

}  // namespace freshet::cuda

// Which problems moe_gate_up_sm90_m1_8.cu and moe_down_sm90_m1_8.cu support. Plain C++.
#pragma once

#include "backend/cuda/moe/moe_rows.h"

namespace freshet::cuda {

inline constexpr int kFewMostChosen = 64, kFewMostExperts = 128;
inline constexpr int64_t kFewMostHidden = 4096;

// All tokens and chosen experts must fit a block's tables, and a block must hold a split-K slice.
inline bool supports_moe_m1_8(const DeviceLimits&, const MoeProblem& p) {
  return (kFewExpertFormats & bit(p.down)) != 0 && !p.weight_before &&
         p.tokens * p.top_k <= kFewMostChosen && p.experts <= kFewMostExperts &&
         leaves(p.hidden) == kKSlices && p.hidden <= kFewMostHidden && p.ff % 64 == 0;
}

}  // namespace freshet::cuda

// Which problems moe_gate_up_q_sm90.cu and moe_down_q_sm90.cu support. Plain C++.
#pragma once

#include "backend/cuda/moe/moe_rows.h"

namespace freshet::cuda {

// For up to 8 tokens moe_sm80 is as fast if experts are large or few are in use.
inline bool supports_moe_q(const DeviceLimits& limits, const MoeProblem& p) {
  constexpr int64_t kSmall = 1024, kRows = 128;
  if ((kFusedExpertFormats & bit(p.down)) == 0 || !p.silu || p.ff % 64 != 0) return false;
  const int64_t pairs = p.tokens * p.top_k, used = pairs < p.experts ? pairs : p.experts;
  const bool enough = p.ff <= kSmall && used * div_up(p.ff, kRows) >= limits.multiprocessors;
  return p.tokens > kTokenTile || enough;
}

}  // namespace freshet::cuda

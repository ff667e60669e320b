// Which problems prefill_sm90.cu supports. Plain C++.
#pragma once

#include "backend/cuda/attention/attention_rows.h"

namespace freshet::cuda {

inline constexpr int64_t kPrefillGroupRows = 64;  // rows of a warpgroup: queries and heads

// Fewer rows leave warps without work.
inline bool supports_prefill(const DeviceLimits&, const AttentionProblem& p) {
  const int d = p.key_dim;
  const bool large = d == 256 && !stores_bytes(p);  // codes find no room
  return p.tokens * (p.heads / p.kv_heads) > kPrefillGroupRows && p.value_dim == d &&
         (d == 64 || d == 128 || large) && p.prefill_aligned && !shares_codes(p) && !p.ranged;
}

}  // namespace freshet::cuda

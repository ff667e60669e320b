// Which problems prefill_sm90.cu supports. Plain C++.
#pragma once

#include "backend/cuda/attention/attention_rows.h"

namespace freshet::cuda {

inline constexpr int64_t kPrefillGroupRows = 64;  // (query, head) rows per warpgroup

// With fewer rows some warps would have no work.
inline bool supports_prefill(const DeviceLimits&, const AttentionProblem& p) {
  const int d = p.key_dim;
  const bool large = d == 256 && !stores_bytes(p);  // for codes there isn't enough shared memory
  return p.tokens * (p.heads / p.kv_heads) > kPrefillGroupRows && p.value_dim == d &&
         (d == 64 || d == 128 || large) && p.prefill_aligned && !shares_codes(p) && !p.ranged;
}

}  // namespace freshet::cuda

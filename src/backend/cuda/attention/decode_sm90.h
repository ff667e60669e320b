// Which problems decode_sm90.cu supports. Plain C++.
#pragma once

#include "backend/cuda/attention/attention_rows.h"

namespace freshet::cuda {

inline constexpr int kDecodeTileRows = 16;  // query heads of a tile, which share a KV head

inline int64_t decode_tiles(const AttentionProblem& p) {
  const int64_t rows = p.tokens * (p.heads / p.kv_heads);
  return int64_t{p.sequences} * p.kv_heads * ((rows + kDecodeTileRows - 1) / kDecodeTileRows);
}
inline bool supports_decode_shape(const AttentionProblem& p) {
  constexpr int64_t kMostCounters = 1 << 16;
  const int d = p.key_dim;
  return p.value_dim == d && (d == 64 || d == 128 || d == 256) &&
         decode_tiles(p) <= kMostCounters && p.decode_aligned && !shares_codes(p) && !p.ranged;
}
inline bool supports_decode(const DeviceLimits&, const AttentionProblem& p) {
  return p.single && supports_decode_shape(p);
}

// Several queries per sequence: drafts that are verified, or what follows a cached prefix. Each
// tile of 16 rows reads the context again, so prefill kernels are faster with more rows.
inline constexpr int64_t kExtendRows = 64;
inline bool supports_extend(const DeviceLimits&, const AttentionProblem& p) {
  return !p.single && p.tokens * (p.heads / p.kv_heads) <= kExtendRows && supports_decode_shape(p);
}

}  // namespace freshet::cuda

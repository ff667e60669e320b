// Which problems decode_sm90.cu supports. Plain C++.
#pragma once

#include "backend/cuda/attention/attention_rows.h"

namespace freshet::cuda {

inline constexpr int kDecodeTileHeads = 16;  // query heads of a tile, which share a KV head

inline int64_t decode_tiles(const AttentionProblem& p) {
  const int64_t tiles = (p.heads / p.kv_heads + kDecodeTileHeads - 1) / kDecodeTileHeads;
  return int64_t{p.sequences} * p.kv_heads * tiles;
}
inline bool supports_decode(const DeviceLimits&, const AttentionProblem& p) {
  constexpr int64_t kMostCounters = 1 << 16;
  const int d = p.key_dim;
  return p.single && p.value_dim == d && (d == 64 || d == 128 || d == 256) &&
         decode_tiles(p) <= kMostCounters && p.decode_aligned && !shares_codes(p) && !p.ranged;
}

}  // namespace freshet::cuda

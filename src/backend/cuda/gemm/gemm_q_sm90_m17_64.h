// Which problems gemm_q_sm90_m17_64.cuh supports. Plain C++.
#pragma once

#include <initializer_list>

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

inline bool supports_q_m17_64_splitk8(const DeviceLimits& limits, const GemmProblem& p) {
  return eight_slices(p) && split_blocks(p, 64) <= limits.multiprocessors;
}
inline bool supports_q_m17_64_splitk4(const DeviceLimits& limits, const GemmProblem& p) {
  return leaves(first_cols(p)) >= 4 && split_blocks(p, 128) <= 2 * limits.multiprocessors;
}
inline bool supports_q_m17_64_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return blocks_of(p, 256) > limits.multiprocessors;
}
// Gate and up as one list would fill more than two waves of pairs of blocks.
inline bool swiglu_fills(const DeviceLimits& limits, const GemmProblem& p,
                         int64_t tokens_of_block) {
  const int64_t pairs = blocks_of(p, 64) * div_up(p.tokens, tokens_of_block) * kClusterPair;
  return whole_lines(p) && pairs > 2 * limits.multiprocessors;
}
inline bool supports_swiglu_q_m17_64(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_fills(limits, p, 64);
}
// Rows per tile (in order of preference) that give the busiest SM the fewest rows. 96 and 160 rows
// are three and five warpgroups.
inline int64_t swiglu_tile_rows(const DeviceLimits& limits, const GemmProblem& p) {
  int64_t best = 0, least = INT64_MAX;
  for (const int64_t rows : {128, 64, 96, 160}) {
    if (p.tokens > 32 && rows % 64 != 0) continue;  // not enough registers for more tokens
    const int64_t waves = div_up(blocks_of(only_gate(p, 1), rows), limits.multiprocessors);
    if (waves * rows < least) {
      best = rows;
      least = waves * rows;
    }
  }
  return best;
}
// The table's rows for tiles of kRows rows.
template <int64_t kRows>
bool supports_swiglu_q_m17_64_rows(const DeviceLimits& limits, const GemmProblem& p) {
  return supports_swiglu_q_m17_64(limits, p) && swiglu_tile_rows(limits, p) == kRows;
}

}  // namespace freshet::cuda

// Which problems gemm_q_sm90_m1_8_small_n.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// Blocks request all of their weights at once: shared memory of an SM, what a block needs besides
// weights (sums, barriers, static), and the bytes of the next GEMM that it prefetches at a time.
inline constexpr int kOneShotShared = 227 << 10, kOneShotBeside = 9 * 1024 + 512;
inline constexpr int kOneShotNext = 1024;

inline bool one_shot(const GemmProblem& p) {
  constexpr int64_t kMostCols = 8192;
  const int64_t cols = first_cols(p);
  for (int i = 0; i < p.count; ++i) {
    if (p.of[i].cols != cols || p.of[i].rows % 16 != 0) return false;
  }
  return p.same_tokens && leaves(cols) == kKSlices && cols <= kMostCols;
}
// Bytes of a tile of 16 rows.
inline int64_t one_shot_bytes(Code code, int64_t cols) {
  return div_up(cols, unit_of(code)) * tile_bytes(code);
}
// Whether two blocks with tiles of `first` and `second` bytes each fit on an SM.
inline bool one_shot_room(int64_t first, int64_t second) {
  return 2 * (first + second + kOneShotBeside) <= kOneShotShared;
}
inline bool supports_q_m1_8_small_n(const DeviceLimits& limits, const GemmProblem& p) {
  const int64_t tile = one_shot_bytes(p.of[0].code, first_cols(p)), tiles = blocks_of(p, 16);
  return one_shot(p) && tiles <= 4 * limits.multiprocessors &&
         one_shot_room(tile, tiles > 2 * limits.multiprocessors ? tile : kOneShotNext);
}
inline bool supports_q_pair_m1_8(const DeviceLimits& limits, const GemmProblem& p) {
  GemmProblem first = p;
  first.count = second_format(p);
  if (first.count == 0 || !one_shot(p)) return false;
  const int64_t cols = first_cols(p), most = 2 * limits.multiprocessors;
  const int64_t tiles = blocks_of(first, 16), blocks = tiles < most ? tiles : most;
  return one_shot_room(one_shot_bytes(p.of[0].code, cols), one_shot_bytes(Code::kQ6_K, cols)) &&
         blocks_of(p, 16) <= 2 * blocks;
}

}  // namespace freshet::cuda

// Which problems gemm_fp8_sm90_m65_128_splitk2.cu supports. Plain C++.
#pragma once

#include <initializer_list>

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// Tiles of 8 rows per pair of blocks; 0: the kernel doesn't support the problem.
inline int fp8_splitk_tiles(const DeviceLimits& limits, const GemmProblem& p) {
  if (p.tokens <= 64 || p.tokens > 128 || fp8_leaves(p.of[0].rows, p.of[0].cols) < 2) return 0;
  for (const int tiles : {8, 12}) {
    if (2 * blocks_of(p, tiles * kTokenTile) <= limits.multiprocessors) return tiles;
  }
  return 0;
}
inline bool supports_fp8_m65_128_splitk2(const DeviceLimits& limits, const GemmProblem& p) {
  // Only if panels of 64 rows would need two waves.
  const int64_t panels = blocks_of(p, 64) * div_up(p.tokens, 64);
  return panels > limits.multiprocessors / 2 && fp8_splitk_tiles(limits, p) != 0;
}

}  // namespace freshet::cuda

// Which problems gemm_q_sm90_two_formats.cu supports. Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// Clusters of two blocks, which take a tile each, fill at most a wave.
inline bool pair_fits_one_wave(const DeviceLimits& limits, const GemmProblem& p,
                               int64_t rows_of_q6_k) {
  int64_t tiles = 0;
  for (int i = 0; i < p.count; ++i) {
    tiles += div_up(p.of[i].rows, p.of[i].code == Code::kQ6_K ? rows_of_q6_k : 128);
  }
  return tiles * kClusterPair <= limits.multiprocessors;
}
inline bool supports_q_pair_m17_64(const DeviceLimits& limits, const GemmProblem& p) {
  return second_format(p) > 0 && eight_slices(p) && pair_fits_one_wave(limits, p, 128);
}
inline bool supports_q_pair_m65(const DeviceLimits& limits, const GemmProblem& p) {
  return second_format(p) > 0 && blocks_of(p, 128) * div_up(p.tokens, 64) <= limits.multiprocessors;
}

}  // namespace freshet::cuda

// Which problems gemm_fp8_sm90_m1_64.cu supports (1 to 64 tokens, and up to 128 if the weights have
// few rows), and run_fp8_wide() of gemm_fp8_sm90_m65.cu (1 to 64 tokens, many rows). Plain C++.
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {

// Blocks claim their panels dynamically if there are many panels and K is not cut.
inline constexpr int kFp8ClaimRoom = (225 << 10) - 2048, kFp8ClaimStages = kFp8ClaimRoom / 8448;
inline constexpr int kFp8ClaimsTold = 8;  // claims in the queue between producer and consumers
inline bool fp8_claims(const DeviceLimits& limits, const GemmProblem& p) {
  const GemmWeight& w = p.of[0];
  const int slices = fp8_leaves(w.rows, w.cols);
  const int64_t steps = div_up(div_up(w.cols, kE4M3Cols), slices);
  return p.tokens <= kTokenTile && slices == 1 && blocks_of(p, 64) >= 4 * limits.multiprocessors &&
         p.same_tokens && steps * kFp8ClaimsTold / 2 >= kFp8ClaimStages &&
         steps * kE4M3TileBytes <= kFp8ClaimRoom / 2;
}
inline bool supports_fp8_m1_64_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  if (fp8_claims(limits, p)) return false;
  bool whole = true;
  for (int i = 0; i < p.count; ++i) whole = whole && whole_in_k(p.of[i].rows);
  if (whole) return true;
  const int64_t tiles = blocks_of(p, 128), most = limits.multiprocessors;
  return tiles >= 2 * most && tiles * 10 >= div_up(tiles, most) * most * 9;
}
inline bool supports_fp8_m1_128(const DeviceLimits& limits, const GemmProblem& p) {
  return p.tokens <= 64 || blocks_of(p, 64) < limits.multiprocessors;
}

}  // namespace freshet::cuda

#include "backend/cpu/kv_scores.h"

#include "backend/cpu/tables.h"

namespace freshet::cpu {

std::span<const ops::ScoreKernel> score_kernels() {
#if defined(__aarch64__)
  static const ops::ScoreKernel kRows[] = {kScoresNeon};
#else
  static const ops::ScoreKernel kRows[] = {kScoresAvx512, kScoresAvx2};
#endif
  return kRows;
}

}  // namespace freshet::cpu

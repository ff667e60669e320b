#define FRESHET_SCORES scores_avx2
#include "backend/cpu/kv_scores.h"
#include "backend/cpu/kv_scores.inl"

namespace freshet::cpu {

const ops::ScoreKernel kScoresAvx2 = {"scores.avx2", ops::CpuIsa::kAvx2, scores_avx2::dots,
                                      scores_avx2::add_weights, scores_avx2::promise};

}  // namespace freshet::cpu

#define FRESHET_SCORES scores_avx512
#include "backend/cpu/kv_scores.h"
#include "backend/cpu/kv_scores.inl"

namespace freshet::cpu {

const ops::ScoreKernel kScoresAvx512 = {"scores.avx512", ops::CpuIsa::kAvx512, scores_avx512::dots,
                                        scores_avx512::add_weights, scores_avx512::promise};

}  // namespace freshet::cpu

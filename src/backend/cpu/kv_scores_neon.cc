#define FRESHET_SCORES scores_neon
#include "backend/cpu/kv_scores.h"
#include "backend/cpu/kv_scores.inl"

namespace freshet::cpu {

const ops::ScoreKernel kScoresNeon = {"scores.neon", ops::CpuIsa::kNeon, scores_neon::dots,
                                      scores_neon::add_weights, scores_neon::promise};

}  // namespace freshet::cpu

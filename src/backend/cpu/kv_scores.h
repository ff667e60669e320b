// The rows of Ops::key_scores(), by instruction set. Immutable; thread-safe.
#pragma once

#include "ops/kernel_table.h"

namespace freshet::cpu {

extern const ops::ScoreKernel kScoresAvx512;  // kv_scores_avx512.cc
extern const ops::ScoreKernel kScoresAvx2;    // kv_scores_avx2.cc
extern const ops::ScoreKernel kScoresNeon;    // kv_scores_neon.cc

}  // namespace freshet::cpu

#include "backend/cuda/moe/moe_rows.h"

#include "backend/cuda/gemm/gemm_rows.h"

namespace freshet::cuda {
namespace {

constexpr uint64_t kFusedFormats = kBlockFormats | bit(Code::kFP8);
constexpr uint64_t kFewFormats = kFusedFormats | bit(Code::kBF16);
constexpr uint64_t kAnyFormat = kFewFormats | bit(Code::kF16) | bit(Code::kF32) | bit(Code::kInt8);

// All tokens and chosen experts fit into a block's tables, and a block holds a slice of K.
bool takes_few(const DeviceLimits&, const MoeProblem& p) {
  constexpr int kMostChosen = 64, kMostExperts = 128;
  constexpr int64_t kMostHidden = 4096;
  return (kFewFormats & bit(p.down)) != 0 && !p.weight_before &&
         p.tokens * p.top_k <= kMostChosen && p.experts <= kMostExperts && leaves(p.hidden) == 8 &&
         p.hidden <= kMostHidden && p.ff % 64 == 0;
}
bool takes_bf16(const DeviceLimits&, const MoeProblem& p) {
  return p.down == Code::kBF16 && p.ff % 64 == 0;
}
// For up to 8 tokens moe_sm80 is as fast where experts are large, or few are in use.
bool takes_q(const DeviceLimits& limits, const MoeProblem& p) {
  constexpr int64_t kSmall = 1024, kRows = 128;
  if ((kFusedFormats & bit(p.down)) == 0 || !p.silu || p.ff % 64 != 0) return false;
  const int64_t pairs = p.tokens * p.top_k, used = pairs < p.experts ? pairs : p.experts;
  const bool enough =
      p.ff <= kSmall && used * ((p.ff + kRows - 1) / kRows) >= limits.multiprocessors;
  return p.tokens > kTokenTile || enough;
}
bool always(const DeviceLimits&, const MoeProblem&) {
  return true;
}

}  // namespace

const MoeRow kMoeRows[kMoeKernels] = {
    {"moe_sm90_m1_8", 90, kFewFormats, 1, 8, "128 experts, K of 2,048 to 4,096, 64 pairs",
     takes_few},
    {"moe_bf16_sm90", 90, bit(Code::kBF16), 1, kAnyTokens, "whole 64 features", takes_bf16},
    {"moe_q_sm90", 90, kFusedFormats, 1, kAnyTokens,
     "SiLU, whole 64 features, more than 8 tokens or many small experts", takes_q},
    {"moe_sm80", 80, kAnyFormat, 1, kAnyTokens, "", always},
};

}  // namespace freshet::cuda

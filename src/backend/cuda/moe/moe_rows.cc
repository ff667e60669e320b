#include "backend/cuda/moe/moe_rows.h"

#include "backend/cuda/moe/moe_bf16_sm90.h"
#include "backend/cuda/moe/moe_q_sm90.h"
#include "backend/cuda/moe/moe_sm90_m1_8.h"

namespace freshet::cuda {
namespace {

constexpr uint64_t kAnyFormat =
    kFewExpertFormats | bit(Code::kF16) | bit(Code::kF32) | bit(Code::kInt8);

bool always(const DeviceLimits&, const MoeProblem&) {
  return true;
}

}  // namespace

const MoeRow kMoeRows[kMoeKernels] = {
    {"moe_sm90_m1_8", 90, kFewExpertFormats, 1, 8, "128 experts, K of 2,048 to 4,096, 64 pairs",
     supports_moe_m1_8},
    {"moe_bf16_sm90", 90, bit(Code::kBF16), 1, kAnyTokens, "whole 64 features", supports_moe_bf16},
    {"moe_q_sm90", 90, kFusedExpertFormats, 1, kAnyTokens,
     "SiLU, whole 64 features, more than 8 tokens or many small experts", supports_moe_q},
    {"moe_sm80", 80, kAnyFormat, 1, kAnyTokens, "", always},
};

}  // namespace freshet::cuda

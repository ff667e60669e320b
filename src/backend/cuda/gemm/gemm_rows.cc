#include "backend/cuda/gemm/gemm_rows.h"

#include "backend/cuda/gemm/gemm_bf16_sm90_m1_32.h"
#include "backend/cuda/gemm/gemm_bf16_sm90_m33_128_balanced.h"
#include "backend/cuda/gemm/gemm_bf16_sm90_m33_128_splitk2.h"
#include "backend/cuda/gemm/gemm_fp8_sm90_m1_64.h"
#include "backend/cuda/gemm/gemm_fp8_sm90_m65_128_splitk2.h"
#include "backend/cuda/gemm/gemm_q_sm90_m17_64.h"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8.h"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_long_k.h"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_small_n.h"
#include "backend/cuda/gemm/gemm_q_sm90_m65.h"
#include "backend/cuda/gemm/gemm_q_sm90_m9_16.h"
#include "backend/cuda/gemm/gemm_q_sm90_m9_16_large_n.h"
#include "backend/cuda/gemm/gemm_q_sm90_two_formats.h"
#include "backend/cuda/gemm/gemm_sm80.h"
#include "backend/cuda/gemm/swiglu_bf16_sm90_m65_128.h"
#include "backend/cuda/gemm/swiglu_fp8_sm90.h"
#include "backend/cuda/gemm/swiglu_q_sm90_m1_8.h"

namespace freshet::cuda {
namespace {

constexpr uint64_t kPairFormats = bit(Code::kQ4_K) | bit(Code::kQ5_K);
constexpr uint64_t kMmaFormats =
    kBlockFormats | bit(Code::kF16) | bit(Code::kBF16) | bit(Code::kFP8);

bool always(const DeviceLimits&, const GemmProblem&) {
  return true;
}
bool is_aligned(const DeviceLimits&, const GemmProblem& p) {
  return p.aligned;
}

}  // namespace

const GemmRow kGemmRows[kGemmKernels] = {
    {"q_pair_sm90_m1_8", 90, kPairFormats, 1, 8,
     "Q6_K behind the others, K from 2,048 to 8,192, two waves of tiles", supports_q_pair_m1_8},
    {"q_pair_sm90_m9_16", 90, kPairFormats, 9, 16, "Q6_K behind the others, few rows",
     supports_q_pair_m9_16},
    {"q_pair_sm90_m17_64", 90, kPairFormats, 17, 64, "Q6_K behind the others, few rows",
     supports_q_pair_m17_64},
    {"q_pair_sm90_m65", 90, kPairFormats, 65, kAnyTokens, "Q6_K behind the others, few rows",
     supports_q_pair_m65},

    {"q_sm90_m1_8_small_n", 90, kBlockFormats, 1, 8, "K from 2,048 to 8,192, few rows",
     supports_q_m1_8_small_n},
    {"q_sm90_m1_8_long_k", 90, kBlockFormats, 1, 8, "one weight, K of 4,096 or more, few rows",
     supports_q_m1_8_long_k},
    {"q_sm90_m1_8_large_n", 90, kManyWarps, 1, 8, "one weight, K of 2,048 or more, many rows",
     supports_q_m1_8_large_n},
    {"q_sm90_m1_8", 90, kBlockFormats, 1, 8, "", always},
    {"q_sm90_m9_16_large_n", 90, kBlockFormats, 9, 16, "K of 2,048 or more, many rows",
     supports_q_m9_16_large_n},
    {"q_sm90_m9_16", 90, kBlockFormats, 9, 16, "K of 2,048 or more", supports_q_m9_16},
    {"q_sm90_m17_64_splitk8", 90, kBlockFormats, 17, 64, "K of 2,048 or more, fewest rows",
     supports_q_m17_64_splitk8},
    {"q_sm90_m17_64_splitk4", 90, kBlockFormats, 17, 64, "K of 1,024 or more, few rows",
     supports_q_m17_64_splitk4},
    {"q_sm90_m17_64_large_n", 90, kDeepGroups, 17, 64, "many rows", supports_q_m17_64_large_n},
    {"q_sm90_m17_64", 90, kBlockFormats, 17, 64, "", always},
    {"q_sm90_m65_splitk4", 90, kBlockFormats, 65, kAnyTokens,
     "K of 1,024 or more, few rows and tokens", supports_q_m65_splitk4},
    {"q_sm90_m65_half_tokens", 90, kBlockFormats, 65, kAnyTokens, "few rows and tokens",
     supports_q_m65_half_tokens},
    {"q_sm90_m65", 90, kBlockFormats, 65, kAnyTokens, "", always},

    {"bf16_sm90_m1_32", 90, bit(Code::kBF16), 1, 32, "K of 2,048 or more", supports_bf16_m1_32},
    {"bf16_sm90_m33_128_splitk2", 90, bit(Code::kBF16), 33, 128, "K of 2,048 or more, few rows",
     supports_bf16_m33_128_splitk2},
    {"bf16_sm90_m33_128_balanced", 90, bit(Code::kBF16), 33, 128, "up to 64 tokens, or few rows",
     supports_bf16_m33_128_balanced},
    {"bf16_sm90_m33", 90, bit(Code::kBF16), 33, kAnyTokens, "", always},

    {"fp8_sm90_m65_128_splitk2", 90, bit(Code::kFP8), 65, 128, "K in slices, few rows",
     supports_fp8_m65_128_splitk2},
    {"fp8_sm90_m1_64_large_n", 90, bit(Code::kFP8), 1, 64, "many rows", supports_fp8_m1_64_large_n},
    {"fp8_sm90_m1_128", 90, bit(Code::kFP8), 1, 128, "up to 64 tokens, or few rows",
     supports_fp8_m1_128},
    {"fp8_sm90_m65", 90, bit(Code::kFP8), 65, kAnyTokens, "", always},

    {"int8_sm90_m1_32", 90, bit(Code::kInt8), 1, 32, "", always},
    {"int8_sm90_m33", 90, bit(Code::kInt8), 33, kAnyTokens, "", always},
    {"int8_sm80", 80, bit(Code::kInt8), 1, kAnyTokens, "", always},

    {"f32_bf16x3_sm90_m513", 90, bit(Code::kExactF32), kMaxRouterTokens + 1, kAnyTokens,
     "aligned rows", is_aligned},
    {"f32_bf16x3_sm80", 80, bit(Code::kExactF32), 1, kAnyTokens, "", always},
    {"f32_sm80_m9_512", 80, bit(Code::kF32), kRowWarps + 1, kMaxRouterTokens, "aligned rows",
     is_aligned},
    {"f32_sm80_m513", 80, bit(Code::kF32), kMaxRouterTokens + 1, kAnyTokens, "aligned rows",
     is_aligned},
    {"f32_sm80", 80, bit(Code::kF32), 1, kAnyTokens, "", always},

    {"sm80_small_m", 80, kMmaFormats, 1, 64, "on Hopper F16, and shapes that no row above takes",
     supports_sm80_small_m},
    {"sm80_large_m", 80, kMmaFormats, 65, kAnyTokens, "on Hopper F16 and BF16",
     supports_sm80_large_m},
};

const GemmRow kSwigluRows[kSwigluKernels] = {
    {"swiglu_q_sm90_m1_8_large_n", 90, kManyWarps, 1, 8, "K of 2,048 or more, many rows",
     supports_swiglu_q_m1_8_large_n},
    {"swiglu_q_sm90_m1_8", 90, kTwoTiles, 1, 8, "whole 64 rows", supports_swiglu_q_m1_8},
    {"swiglu_q_sm90_m9_16", 90, kBlockFormats, 9, 16, "K of 2,048 or more, many rows",
     supports_swiglu_q_m9_16},
    {"swiglu_q_sm90_m17_64_large_n", 90, kBlockFormats, 17, 64,
     "many rows, which tiles of 128 balance best", supports_swiglu_q_m17_64_rows<128>},
    {"swiglu_q_sm90_m17_32_rows160", 90, kBlockFormats, 17, 32,
     "many rows, which tiles of 160 balance best", supports_swiglu_q_m17_64_rows<160>},
    {"swiglu_q_sm90_m17_32_rows96", 90, kBlockFormats, 17, 32,
     "many rows, which tiles of 96 balance best", supports_swiglu_q_m17_64_rows<96>},
    {"swiglu_q_sm90_m17_64", 90, kBlockFormats, 17, 64, "many rows", supports_swiglu_q_m17_64},
    {"swiglu_q_sm90_m65", 90, kBlockFormats, 65, kAnyTokens, "many rows or tokens",
     supports_swiglu_q_m65},

    {"swiglu_bf16_sm90_m1_16", 90, bit(Code::kBF16), 1, 16, "K of 2,048 or more",
     supports_swiglu_bf16_m1_32},
    {"swiglu_bf16_sm90_m17_32", 90, bit(Code::kBF16), 17, 32, "K of 2,048 or more",
     supports_swiglu_bf16_m1_32},
    {"swiglu_bf16_sm90_m33_64", 90, bit(Code::kBF16), 33, 64, "", always},
    {"swiglu_bf16_sm90_m65_128", 90, bit(Code::kBF16), 65, 128, "rows that fill passes",
     supports_swiglu_bf16_m65_128},
    {"swiglu_bf16_sm90_m65", 90, bit(Code::kBF16), 65, kAnyTokens, "", always},

    {"swiglu_fp8_sm90_m1_64", 90, bit(Code::kFP8), 1, 64, "many rows", supports_swiglu_fp8},
    {"swiglu_fp8_sm90_m65", 90, bit(Code::kFP8), 65, kAnyTokens, "many rows", supports_swiglu_fp8},

    {"swiglu_int8_sm90_m33", 90, bit(Code::kInt8), 33, kAnyTokens, "", always},
};

Order activation_order(const DeviceLimits& limits, Code code, int64_t tokens) {
  constexpr int64_t kLanes = 64, kLanesOfBf16 = 32, kLanesOfBlocks = 16;
  if (code == Code::kFP8 && limits.capability == 90) return Order::kE4M3;
  if (code == Code::kInt8) return Order::kInt8;
  int64_t most = kLanes;
  if (limits.capability == 90 && code == Code::kBF16) most = kLanesOfBf16;
  if (limits.capability == 90 && unit_of(code) != 0) most = kLanesOfBlocks;
  return tokens > most ? Order::kCores : Order::kLanes;
}

int64_t blocks_of(const GemmProblem& p, int64_t rows) {
  int64_t blocks = 0;
  for (int i = 0; i < p.count; ++i) blocks += div_up(p.of[i].rows, rows);
  return blocks;
}

int even_share(const DeviceLimits& limits, const GemmProblem& p) {
  int share = 1;
  while (blocks_of(p, int64_t{16} * share) > limits.multiprocessors && share < 1 << 16) ++share;
  return share;
}

}  // namespace freshet::cuda

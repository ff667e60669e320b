// Which kernels run experts (see runtime/kernel_row.h).
#pragma once

#include "backend/cuda/gemm/gemm_rows.h"
#include "backend/cuda/runtime/kernel_row.h"

namespace freshet::cuda {

struct MoeProblem {
  int format = 0;  // Code of gate and up
  Code down = Code::kBF16;
  int64_t tokens = 0;
  int64_t hidden = 0, ff = 0;
  int top_k = 0, experts = 0;
  bool silu = false;           // otherwise a clamped GLU
  bool weight_before = false;  // tokens are scaled before gate and up
};

using MoeRow = KernelRow<MoeProblem>;

// Formats of gate, up and down that the fused kernels support: for many tokens, and for few.
inline constexpr uint64_t kFusedExpertFormats = kBlockFormats | bit(Code::kFP8);
inline constexpr uint64_t kFewExpertFormats = kFusedExpertFormats | bit(Code::kBF16);

enum MoeKernel : int { kMoeM1_8, kMoeBf16, kMoeQ, kMoeSm80, kMoeKernels };
extern const MoeRow kMoeRows[kMoeKernels];

}  // namespace freshet::cuda

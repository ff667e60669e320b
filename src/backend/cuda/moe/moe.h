// Shared by the sources of the MoE kernels.
#pragma once

#include "backend/cuda/api.h"

namespace freshet::cuda {

inline constexpr int kManySlot = 192;  // tokens per slot if BF16 experts have many
inline constexpr int kWideSlot = 128;  // the same for other formats

// Whether experts() stores the experts' outputs in BF16 rather than F32.
inline bool given_bf16(Code code, int slot_tokens) {
  return slot_tokens == (code == Code::kBF16 ? kManySlot : kWideSlot);
}

// moe_gather.cu: x by place as core matrices, the layout that expert GEMMs read. With slots of
// kManySlot the layout is [64 columns][place][16 bytes], and the i-th 16 bytes of place p are at i
// ^ (p % 8).
int gather_places(const Context& ctx, const ExpertsArgs& e);

// moe_bf16_sm90_wgmma.cu: gate, up and down in BF16, with slots of 8 to 128.
int run_experts_wgmma(const Context& ctx, const ExpertsArgs& e);

// moe_gate_up_q_sm90.cu, moe_down_q_sm90.cu: gate and up in block formats, and down, with slots of
// 32 to 128.
int run_experts_gate(const Context& ctx, const ExpertsArgs& e);
int run_experts_down(const Context& ctx, const ExpertsArgs& e);

// moe_bf16_sm90_large_m.cu: gate, up and down in BF16, with slots of kManySlot.
int run_many_experts(const Context& ctx, const ExpertsArgs& e);

// moe_down_sm90_m1_8.cu: down for few tokens, and the weighted sums of the experts' outputs.
int run_few_down(const Context& ctx, const FewExpertsArgs& e);

}  // namespace freshet::cuda

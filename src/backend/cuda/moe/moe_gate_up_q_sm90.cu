// Gate and up of experts in block formats (moe_q_sm90.cuh).
#include "backend/cuda/moe/moe_q_sm90.cuh"

namespace freshet::cuda {
namespace {

template <class F, int NT, int kGroups>
using GateUpShape = decode::Shape<F, NT, decode::Split::kGate, kGroups>;

}  // namespace

int run_experts_gate(const Context& ctx, const ExpertsArgs& e) {
  return decode::with_quantised(e.gate_up_code, [&](auto f) {
    using F = decltype(f);
    switch (e.groups.slot_tokens) {
      case 32:
        return decode::launch_experts<GateUpShape<F, 4, 4>>(ctx, e);
      case 64:
        return decode::launch_experts<GateUpShape<F, 8, 4>>(ctx, e);
      case 128:
        return decode::launch_experts<GateUpShape<F, 16, 2>>(ctx, e);
      default:
        return static_cast<int>(cudaErrorInvalidValue);
    }
  });
}

}  // namespace freshet::cuda

#include <numeric>

#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

Status assemble(WeightReader& reader, const MlpSpec& mlp, int64_t hidden, int layer,
                MlpWeights& out) {
  const int64_t ff = mlp.ff;
  const bool fused = mlp.gated && reader.find(Role::kGate, ".weight", layer) == nullptr &&
                     reader.find(Role::kGateUp, ".weight", layer) != nullptr;
  if (fused) {
    std::vector<int64_t> order(static_cast<size_t>(ff));
    const bool up_first = reader.architecture().up_before_gate && !reader.is_gguf();
    std::iota(order.begin(), order.end(), up_first ? ff : 0);
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.gate, Role::kGateUp, layer, 2 * ff, hidden, mlp.bias, order));
    std::iota(order.begin(), order.end(), up_first ? 0 : ff);
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.up, Role::kGateUp, layer, 2 * ff, hidden, mlp.bias, order));
  } else {
    if (mlp.gated) {
      FRESHET_RETURN_IF_ERROR(reader.linear(out.gate, Role::kGate, layer, ff, hidden, mlp.bias));
    }
    const bool other = !mlp.gated && reader.find(Role::kUngatedUp, ".weight", layer) != nullptr;
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.up, other ? Role::kUngatedUp : Role::kUp, layer, ff, hidden, mlp.bias));
  }
  return reader.linear(out.down, Role::kDown, layer, hidden, ff, mlp.bias || mlp.down_bias);
}

Status make(DummyMaker& maker, const MlpSpec& mlp, int64_t hidden, MlpWeights& out) {
  return maker.mlp(out, mlp, hidden, "mlp");
}

}  // namespace

constinit const BranchLoading kMlpLoading =
    branch_loading<MlpSpec, MlpWeights, assemble, make>(kMlpNorms);

}  // namespace freshet::models

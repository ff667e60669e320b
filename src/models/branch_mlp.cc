#include <cmath>
#include <numeric>

#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

// The file stores the slopes as numbers whose softplus they are, the negative one less beta.
Status assemble_xielu(WeightReader& reader, int layer, ops::Xielu& out) {
  const auto number = [&](Role role) -> Result<float> {
    FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor, reader.require(role, "", layer));
    FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*tensor, 1));
    return values.front();
  };
  const auto softplus = [](float x) { return std::log1p(std::exp(x)); };
  if (reader.find(Role::kXieluBeta, "", layer) != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(out.beta, number(Role::kXieluBeta));
  }
  if (reader.find(Role::kXieluEps, "", layer) != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(out.eps, number(Role::kXieluEps));
  }
  FRESHET_ASSIGN_OR_RETURN(const float positive, number(Role::kXieluPositive));
  FRESHET_ASSIGN_OR_RETURN(const float negative, number(Role::kXieluNegative));
  out.positive = softplus(positive);
  out.negative = out.beta + softplus(negative);
  return {};
}

Status assemble(WeightReader& reader, const MlpSpec& mlp, int64_t hidden, int layer,
                MlpWeights& out) {
  const int64_t ff = mlp.ff;
  const bool fused = mlp.gated && reader.find(Role::kGate, ".weight", layer) == nullptr &&
                     reader.find(Role::kGateUp, ".weight", layer) != nullptr;
  if (fused) {
    std::vector<int64_t> order(static_cast<size_t>(ff));
    std::iota(order.begin(), order.end(), 0);
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.gate, Role::kGateUp, layer, 2 * ff, hidden, mlp.bias, order));
    std::iota(order.begin(), order.end(), ff);
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.up, Role::kGateUp, layer, 2 * ff, hidden, mlp.bias, order));
  } else {
    if (mlp.gated) {
      FRESHET_RETURN_IF_ERROR(reader.linear(out.gate, Role::kGate, layer, ff, hidden, mlp.bias));
    }
    FRESHET_RETURN_IF_ERROR(reader.linear(out.up, Role::kUp, layer, ff, hidden, mlp.bias));
  }
  if (mlp.xielu) FRESHET_RETURN_IF_ERROR(assemble_xielu(reader, layer, out.xielu));
  return reader.linear(out.down, Role::kDown, layer, hidden, ff, mlp.bias);
}

Status make(DummyMaker& maker, const MlpSpec& mlp, int64_t hidden, MlpWeights& out) {
  return maker.mlp(out, mlp, hidden, "mlp");
}

}  // namespace

constinit const BranchLoading kMlpLoading =
    branch_loading<MlpSpec, MlpWeights, assemble, make>(kMlpNorms);

}  // namespace freshet::models

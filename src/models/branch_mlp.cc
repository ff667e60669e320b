#include <cmath>
#include <numeric>

#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

// One of the layer's numbers: a tensor, or an element of a list in GGUF's metadata.
Result<float> xielu_number(const WeightReader& reader, Role role, int layer) {
  if (reader.is_gguf()) {
    const std::string key = reader.stem(role);
    const auto list = reader.metadata(key);
    const auto at = static_cast<size_t>(layer);
    if (list && list->size() == 1) return list->front();
    if (list && at < list->size()) return (*list)[at];
    return invalid_argument("GGUF: '{}' has no number for layer {}", key, layer);
  }
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor, reader.require(role, "", layer));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*tensor, 1));
  return values.front();
}

// The file stores the slopes as numbers whose softplus they are, the negative one less beta.
Status assemble_xielu(const WeightReader& reader, int layer, ops::Xielu& out) {
  const auto softplus = [](float x) { return std::log1p(std::exp(x)); };
  if (reader.is_gguf() || reader.find(Role::kXieluBeta, "", layer) != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(out.beta, xielu_number(reader, Role::kXieluBeta, layer));
    FRESHET_ASSIGN_OR_RETURN(out.eps, xielu_number(reader, Role::kXieluEps, layer));
  }
  FRESHET_ASSIGN_OR_RETURN(const float positive, xielu_number(reader, Role::kXieluPositive, layer));
  FRESHET_ASSIGN_OR_RETURN(const float negative, xielu_number(reader, Role::kXieluNegative, layer));
  out.positive = softplus(positive);
  out.negative = out.beta + softplus(negative);
  return {};
}

// The second matrix has the rows of gates, and then those of up.
Status assemble_adapters(WeightReader& reader, const MlpSpec& mlp, int64_t hidden, int layer,
                         MlpWeights& out) {
  const int64_t ff = mlp.ff, rank = mlp.adapter_rank;
  const int use = reader.shared_use();
  FRESHET_RETURN_IF_ERROR(reader.linear(out.adapter_down, Role::kGateUpAdapterDown, layer, rank,
                                        hidden, false, {}, use));
  std::vector<int64_t> order(static_cast<size_t>(ff));
  for (Linear* half : {&out.gate_adapter, &out.up_adapter}) {
    std::iota(order.begin(), order.end(), half == &out.gate_adapter ? 0 : ff);
    FRESHET_RETURN_IF_ERROR(
        reader.linear(*half, Role::kGateUpAdapterUp, layer, 2 * ff, rank, false, order, use));
  }
  return {};
}

Status assemble_linear(WeightReader& reader, const LinearSpec& spec, int64_t hidden, int layer,
                       LinearWeights& out) {
  return reader.linear(out.linear, Role::kSideLinear, layer, hidden, hidden, spec.bias);
}

Status make_linear(DummyMaker& maker, const LinearSpec& spec, int64_t hidden, LinearWeights& out) {
  return maker.linear(out.linear, "linear", Role::kSideLinear, hidden, hidden, spec.bias);
}

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
    FRESHET_RETURN_IF_ERROR(reader.linear(out.up, Role::kUp, layer, ff, hidden, mlp.bias));
  }
  if (mlp.adapter_rank > 0)
    FRESHET_RETURN_IF_ERROR(assemble_adapters(reader, mlp, hidden, layer, out));
  if (mlp.tanh_gate) {
    FRESHET_ASSIGN_OR_RETURN(out.scale, read_tanh_gate(reader, Role::kMlpGate, layer));
  }
  if (mlp.xielu) FRESHET_RETURN_IF_ERROR(assemble_xielu(reader, layer, out.xielu));
  return reader.linear(out.down, Role::kDown, layer, hidden, ff, mlp.bias || mlp.down_bias);
}

Status make(DummyMaker& maker, const MlpSpec& mlp, int64_t hidden, MlpWeights& out) {
  return maker.mlp(out, mlp, hidden, "mlp");
}

}  // namespace

Result<float> read_tanh_gate(WeightReader& reader, Role role, int layer) {
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor, reader.require(role, "", layer));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*tensor, 1));
  return std::tanh(values.front());
}

constinit const BranchLoading kMlpLoading =
    branch_loading<MlpSpec, MlpWeights, assemble, make>(kMlpNorms);
constinit const BranchLoading kLinearLoading =
    branch_loading<LinearSpec, LinearWeights, assemble_linear, make_linear>(kMlpNorms);

}  // namespace freshet::models

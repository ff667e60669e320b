#include "models/parts.h"

#include <algorithm>
#include <array>
#include <utility>

#include "layers/branch_kinds.h"
#include "layers/decoder.h"
#include "models/assemble.h"
#include "models/branch_loading.h"

namespace freshet::models {
namespace {

struct LinearRole {
  Role role;
  InputOf input;
  bool expert = false;   // each expert has a tensor of its own
  bool stacked = false;  // [experts, rows, cols]
};

constexpr LinearRole kAttentionRoles[] = {
    {Role::kQuery, InputOf::kNorm},          {Role::kKey, InputOf::kNorm},
    {Role::kValue, InputOf::kNorm},          {Role::kQkv, InputOf::kNorm},
    {Role::kQueryDown, InputOf::kNorm},      {Role::kKvDown, InputOf::kNorm},
    {Role::kQueryUp, InputOf::kQueryLatent}, {Role::kKvUp, InputOf::kLatent},
    {Role::kOutput, InputOf::kAttention},
};

// Of short convolutions, Mamba and Mamba-2. Mamba's projection of step sizes, which reads few
// numbers, is not among them.
constexpr LinearRole kStateRoles[] = {
    {Role::kStateIn, InputOf::kNorm},
    {Role::kStateX, InputOf::kConvolution},
    {Role::kStateOut, InputOf::kState},
};

constexpr LinearRole kMlpRoles[] = {
    {Role::kGate, InputOf::kNorm},
    {Role::kUp, InputOf::kNorm},
    {Role::kGateUp, InputOf::kNorm},
    {Role::kDown, InputOf::kGated},
    {Role::kExpertGate, InputOf::kNorm, true},
    {Role::kExpertUp, InputOf::kNorm, true},
    {Role::kExpertDown, InputOf::kGated, true},
    {Role::kExpertsGate, InputOf::kNorm, false, true},
    {Role::kExpertsUp, InputOf::kNorm, false, true},
    {Role::kExpertsGateUp, InputOf::kNorm, false, true},
    {Role::kExpertsDown, InputOf::kGated, false, true},
    {Role::kSharedGate, InputOf::kNorm},
    {Role::kSharedUp, InputOf::kNorm},
    {Role::kSharedDown, InputOf::kSharedGated},
};

// Appends the matrices of one tensor.
Status add_tensor(const WeightReader& reader, const LinearRole& role,
                  const loader::TensorSource& source, LinearTensor linear,
                  std::vector<LinearTensor>& out) {
  const size_t wanted = role.stacked ? 3 : 2;
  if (source.shape.size() != wanted) {
    return unsupported("tensor '{}' has {} dimensions where a linear layer has {}", source.name,
                       source.shape.size(), wanted);
  }
  const Architecture& a = reader.architecture();
  const bool transposed = !reader.is_gguf() && (role.stacked ? a.experts_transposed : a.transposed);
  const int64_t first = source.shape[wanted - 2], last = source.shape[wanted - 1];
  linear.source = &source;
  linear.role = role.role;
  linear.input = role.input;
  linear.layout = transposed ? Layout::kTransposed : Layout::kRows;
  linear.rows = transposed ? last : first;
  linear.cols = transposed ? first : last;
  if (!role.stacked) {
    out.push_back(linear);
    return {};
  }
  linear.count = source.shape[0];
  for (linear.index = 0; linear.index < linear.count; ++linear.index) {
    linear.expert = static_cast<int>(linear.index);
    out.push_back(linear);
  }
  return {};
}

Status add_role(const WeightReader& reader, const LinearRole& role, const BranchSpec& branch,
                int layer, std::vector<LinearTensor>& out) {
  LinearTensor linear;
  linear.layer = layer;
  int experts = 1;
  if (role.expert) {
    const MoeSpec* moe = std::get_if<MoeSpec>(&branch.body);
    experts = moe == nullptr ? 0 : moe->routing.experts;
  }
  for (int e = 0; e < experts; ++e) {
    linear.expert = role.expert ? e : -1;
    const auto* source = reader.find(role.role, ".weight", layer, linear.expert);
    // Granite's hybrids without experts have the names of a shared expert for their MLP.
    const bool known = std::ranges::any_of(
        out, [&](const LinearTensor& t) { return t.source == source && t.role != role.role; });
    if (source == nullptr || known) continue;
    FRESHET_RETURN_IF_ERROR(add_tensor(reader, role, *source, linear, out));
  }
  return {};
}

}  // namespace

std::vector<Part> parts_of(const ModelSpec& spec) {
  std::vector<Part> out = {{}};
  for (int layer = 0; layer < static_cast<int>(spec.layers.size()); ++layer) {
    const LayerSpec& l = spec.layers[static_cast<size_t>(layer)];
    const auto branches = static_cast<int>(l.branches.size());
    const int together = l.parallel_branches();
    if (together > 0) out.push_back({layer, 0, together});
    for (int b = together; b < branches; ++b) out.push_back({layer, b, 1});
  }
  return out;
}

Result<std::unique_ptr<Model>> load_part(const loader::Checkpoint& checkpoint,
                                         const Architecture& architecture, const ModelSpec& spec,
                                         const Part& part, ops::Ops& ops) {
  const Progress no_progress;
  WeightReader reader(checkpoint, architecture, ops, no_progress);
  ModelSpec own = spec;
  own.layers.clear();
  own.final_norm.reset();
  ModelWeights weights;
  if (part.layer < 0) {
    FRESHET_RETURN_IF_ERROR(assemble_embedding(reader, spec, weights));
  } else {
    const LayerSpec& whole = spec.layers[static_cast<size_t>(part.layer)];
    LayerSpec& layer = own.layers.emplace_back();
    layer.parallel = part.branches > 1;
    const auto first = whole.branches.begin() + part.first_branch;
    layer.branches.assign(first, first + part.branches);
    own.features = FeatureSpec{};
    own.features->width = spec.hidden_size;
    own.features->use = FeatureSpec::Use::kStream;
    FRESHET_RETURN_IF_ERROR(
        assemble_layer(reader, layer, spec.hidden_size, part.layer, weights.layers.emplace_back()));
  }
  auto model = std::make_unique<Decoder>(own, std::move(weights), reader.take_infos(), ops);
  FRESHET_RETURN_IF_ERROR(model->capture({static_cast<int>(own.layers.size())}));
  return std::unique_ptr<Model>(std::move(model));
}

Result<std::unique_ptr<Model>> load_head(const loader::Checkpoint& checkpoint,
                                         const Architecture& architecture, const ModelSpec& spec,
                                         ops::Ops& ops) {
  const Progress no_progress;
  WeightReader reader(checkpoint, architecture, ops, no_progress);
  ModelSpec own = spec;
  own.layers.clear();
  own.features = FeatureSpec{};
  own.features->width = spec.hidden_size;
  own.features->use = FeatureSpec::Use::kStream;
  ModelWeights weights;
  FRESHET_RETURN_IF_ERROR(assemble_ends(reader, spec, weights));
  return std::unique_ptr<Model>(
      std::make_unique<Decoder>(own, std::move(weights), reader.take_infos(), ops));
}

Result<std::vector<LinearTensor>> linear_tensors(const WeightReader& reader, const ModelSpec& spec,
                                                 const Part& part) {
  std::vector<LinearTensor> out;
  if (part.layer < 0) return out;
  const LayerSpec& layer = spec.layers[static_cast<size_t>(part.layer)];
  for (int b = part.first_branch; b < part.first_branch + part.branches; ++b) {
    const BranchSpec& branch = layer.branches[static_cast<size_t>(b)];
    const bool attention = loading_of(branch).norms.in == Role::kAttentionIn;
    const BranchKind& kind = kind_of(branch);
    const bool state = kind.cache != nullptr && kind.store == nullptr;
    const std::span<const LinearRole> roles = state ? std::span<const LinearRole>(kStateRoles)
                                              : attention
                                                  ? std::span<const LinearRole>(kAttentionRoles)
                                                  : kMlpRoles;
    for (const LinearRole& role : roles) {
      FRESHET_RETURN_IF_ERROR(add_role(reader, role, branch, part.layer, out));
    }
  }
  return out;
}

}  // namespace freshet::models

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
  bool adapter = false;  // of a shared block: each layer has its own
};

constexpr LinearRole kAttentionRoles[] = {
    {Role::kQuery, InputOf::kNorm},
    {Role::kKey, InputOf::kNorm},
    {Role::kValue, InputOf::kNorm},
    {Role::kQkv, InputOf::kNorm},
    {Role::kQueryDown, InputOf::kNorm},
    {Role::kKvDown, InputOf::kNorm},
    {Role::kQueryUp, InputOf::kQueryLatent},
    {Role::kKvUp, InputOf::kLatent},
    {Role::kOutput, InputOf::kAttention},
    {Role::kQueryAdapterDown, InputOf::kNorm, false, false, true},
    {Role::kQueryAdapterUp, InputOf::kAdapter, false, false, true},
    {Role::kKeyAdapterDown, InputOf::kNorm, false, false, true},
    {Role::kKeyAdapterUp, InputOf::kAdapter, false, false, true},
    {Role::kValueAdapterDown, InputOf::kNorm, false, false, true},
    {Role::kValueAdapterUp, InputOf::kAdapter, false, false, true},
};

// Of short convolutions, Mamba, Mamba-2 and gated delta nets. Mamba's projection of step sizes,
// which reads few numbers, is not among them, nor are the factors of a delta net's steps, two
// numbers for each head.
constexpr LinearRole kStateRoles[] = {
    {Role::kStateIn, InputOf::kNorm},
    {Role::kStateZ, InputOf::kNorm},
    {Role::kStateX, InputOf::kConvolution},
    {Role::kStateOut, InputOf::kState},
};

// Lightning attention has a gate for each channel, as large as its queries.
constexpr LinearRole kLightningRoles[] = {
    {Role::kStateIn, InputOf::kNorm},
    {Role::kStateGates, InputOf::kNorm},
    {Role::kStateOut, InputOf::kState},
};

constexpr LinearRole kSideRoles[] = {
    {Role::kSideLinear, InputOf::kSide},
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
    {Role::kGateUpAdapterDown, InputOf::kNorm, false, false, true},
    {Role::kGateUpAdapterUp, InputOf::kAdapter, false, false, true},
};

std::span<const LinearRole> roles_of(const BranchSpec& branch) {
  if (std::holds_alternative<LightningSpec>(branch.body)) return kLightningRoles;
  if (std::holds_alternative<LinearSpec>(branch.body)) return kSideRoles;
  const BranchKind& kind = kind_of(branch);
  if (kind.cache != nullptr && kind.store == nullptr) return kStateRoles;
  if (loading_of(branch).norms.in == Role::kAttentionIn) return kAttentionRoles;
  return kMlpRoles;
}

bool is_shared(const BranchSpec& branch) {
  return branch.sharers.size() > 1;
}

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
                LinearTensor linear, std::vector<LinearTensor>& out) {
  int experts = 1;
  if (role.expert) {
    const MoeSpec* moe = std::get_if<MoeSpec>(&branch.body);
    experts = moe == nullptr ? 0 : moe->routing.experts;
  }
  if (role.adapter) linear.adapter = branch.use;
  const int layer = linear.layer;
  for (int e = 0; e < experts; ++e) {
    linear.expert = role.expert ? e : -1;
    linear.layer = layer;
    const auto* source =
        find_shared(reader, branch, role.role, ".weight", linear.layer, linear.which());
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
    const bool side = l.branches.front().side != Side::kNone;
    const int together = side ? branches : l.parallel_branches();
    if (together > 0) out.push_back({layer, 0, together});
    for (int b = together; b < branches; ++b) out.push_back({layer, b, 1});
  }
  return out;
}

std::vector<Part> shared_parts_of(const ModelSpec& spec) {
  std::vector<Part> out;
  for (int layer = 0; layer < static_cast<int>(spec.layers.size()); ++layer) {
    const std::vector<BranchSpec>& branches = spec.layers[static_cast<size_t>(layer)].branches;
    const auto first = std::ranges::find_if(branches, is_shared);
    if (first == branches.end() || first->sharers.front() != layer) continue;
    const auto last = std::find_if_not(first, branches.end(), is_shared);
    Part& part = out.emplace_back();
    part.layer = layer;
    part.first_branch = static_cast<int>(first - branches.begin());
    part.branches = static_cast<int>(last - first);
    part.shared = true;
  }
  return out;
}

const std::vector<int>& sharers_of(const ModelSpec& spec, const Part& shared) {
  FRESHET_CHECK(shared.shared, "a part that runs has no sharers");
  const LayerSpec& layer = spec.layers[static_cast<size_t>(shared.layer)];
  return layer.branches[static_cast<size_t>(shared.first_branch)].sharers;
}

const loader::TensorSource* find_shared(const WeightReader& reader, const BranchSpec& branch,
                                        Role role, std::string_view suffix, int& layer, int which) {
  const auto* found = reader.find(role, suffix, layer, which);
  for (size_t i = 0; found == nullptr && i < branch.sharers.size(); ++i) {
    found = reader.find(role, suffix, branch.sharers[i], which);
    if (found != nullptr) layer = branch.sharers[i];
  }
  return found;
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
  FRESHET_CHECK(!part.shared, "a part that does not run");
  if (part.layer >= 0) {
    const LayerSpec& whole = spec.layers[static_cast<size_t>(part.layer)];
    LayerSpec& layer = own.layers.emplace_back();
    const auto first = whole.branches.begin() + part.first_branch;
    layer.branches.assign(first, first + part.branches);
    layer.parallel = part.branches > 1 && first->side == Side::kNone;
  }
  // Side streams read the embeddings, too.
  if (part.layer < 0 || has_side_streams(own))
    FRESHET_RETURN_IF_ERROR(assemble_embedding(reader, spec, weights));
  if (part.layer >= 0) {
    own.features = FeatureSpec{};
    own.features->width = spec.hidden_size;
    own.features->use = FeatureSpec::Use::kStream;
    FRESHET_RETURN_IF_ERROR(assemble_layer(reader, own.layers.front(), spec.hidden_size, part.layer,
                                           weights.layers.emplace_back()));
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
    LinearTensor linear;
    linear.layer = part.layer;
    linear.branch = b;
    for (const LinearRole& role : roles_of(branch)) {
      const bool elsewhere = is_shared(branch) && part.shared == role.adapter;
      if (!elsewhere) FRESHET_RETURN_IF_ERROR(add_role(reader, role, branch, linear, out));
    }
  }
  return out;
}

std::vector<const loader::TensorSource*> other_norm_readers(const WeightReader& reader,
                                                            const ModelSpec& spec, const Part& part,
                                                            int branch) {
  const auto branch_of = [&](int layer) -> const BranchSpec& {
    return spec.layers[static_cast<size_t>(layer)].branches[static_cast<size_t>(branch)];
  };
  std::vector<const loader::TensorSource*> out;
  const auto add = [&](Role role, int layer, int which) {
    const auto* t = find_shared(reader, branch_of(layer), role, ".weight", layer, which);
    if (t != nullptr) out.push_back(t);
  };
  const BranchSpec& own = branch_of(part.layer);
  if (std::holds_alternative<MoeSpec>(own.body)) {
    add(Role::kRouter, part.layer, -1);
    add(Role::kSharedScale, part.layer, -1);
  } else if (std::holds_alternative<DeltaNetSpec>(own.body)) {
    add(Role::kStateGates, part.layer, -1);
    add(Role::kStateDt, part.layer, -1);
  }
  for (const LinearRole& role : roles_of(own)) {
    if (!part.shared || !role.adapter || role.input != InputOf::kNorm) continue;
    for (const int layer : own.sharers) add(role.role, layer, branch_of(layer).use);
  }
  return out;
}

}  // namespace freshet::models

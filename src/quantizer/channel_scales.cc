// Scales of input channels (AWQ, SmoothQuant), folded into what makes those inputs: a norm, the
// values of attention, the up projection of a gated MLP, or the norm behind a state.
#include <algorithm>
#include <cstring>
#include <utility>

#include "models/branch_loading.h"
#include "quantizer/methods/scales.h"
#include "quantizer/quantize_job.h"

namespace freshet::quantizer {
namespace {

using models::InputOf;
using models::LinearTensor;
using models::Role;

// A search holds its matrices in memory, in F32: of many experts a few stand for all.
constexpr size_t kMostMatrices = 12;

// The role of the rows that make the inputs of a matrix, channel by channel; kCount: none does.
Role maker_of(Role role) {
  switch (role) {
    case Role::kOutput:
      return Role::kValue;
    case Role::kDown:
      return Role::kUp;
    case Role::kExpertDown:
      return Role::kExpertUp;
    case Role::kSharedDown:
      return Role::kSharedUp;
    default:
      return Role::kCount;
  }
}

// Whether a factor of a channel of the maker comes through to the reader unchanged.
bool passes_through(const BranchSpec& branch, Role reader) {
  // Adapters add to values and to what up projections make.
  if (const auto* a = std::get_if<AttentionSpec>(&branch.body))
    return reader == Role::kOutput && a->kv_heads == a->heads && a->adapter_rank == 0;
  if (const auto* mlp = std::get_if<MlpSpec>(&branch.body))
    return mlp->gated && mlp->adapter_rank == 0;
  if (const auto* moe = std::get_if<MoeSpec>(&branch.body)) return moe->glu.limit == 0.0f;
  return false;
}

// Whether a norm with a weight for each input of kStateOut is the last thing that changes them,
// other than gates. A delta net's norm has the same weights for all heads.
bool ends_in_norm(const BranchSpec& branch) {
  if (const auto* m = std::get_if<Mamba2Spec>(&branch.body)) return m->norm && m->norm->weight;
  const auto* l = std::get_if<LightningSpec>(&branch.body);
  return l != nullptr && l->norm.weight;
}

}  // namespace

bool takes_scales(const BranchSpec& branch) {
  return branch.norms.in && branch.norms.in->weight && !branch.normed_stream;
}

// The scales that a search finds for matrices that read the same inputs; empty: none help.
Result<std::vector<float>> QuantizeJob::search_scales(const std::vector<const Work*>& readers,
                                                      const InputStats& stats) {
  std::vector<std::vector<float>> numbers;
  std::vector<LinearWeights> linears;
  const size_t step = (readers.size() + kMostMatrices - 1) / kMostMatrices;
  for (size_t i = 0; i < readers.size(); i += step) {
    FRESHET_ASSIGN_OR_RETURN(auto values, working_.read(readers[i]->tensor));
    linears.push_back({nullptr, readers[i]->tensor.rows});
    numbers.push_back(std::move(values));
  }
  for (size_t i = 0; i < linears.size(); ++i) linears[i].w = numbers[i].data();
  ThreadPool& pool = working_.compute()->pool();
  InputScales found;
  if (options_.method.awq) {
    FRESHET_ASSIGN_OR_RETURN(found,
                             awq_search(linears, readers.front()->targets.front(), stats, pool));
  } else {
    FRESHET_ASSIGN_OR_RETURN(found, smooth_scales(linears, stats, -1.0f, stats.samples, pool));
  }
  if (std::ranges::all_of(found.scales, [](float s) { return s == 1.0f; })) found.scales.clear();
  return std::move(found.scales);
}

// Replaces the numbers of a tensor that stays in its type.
Status QuantizeJob::change_tensor(const std::string& name, std::span<const float> values) {
  FRESHET_RETURN_IF_ERROR(working_.write_all(name, values));
  if (std::ranges::count(changed_, name) == 0) changed_.push_back(name);
  return {};
}

// Divides a norm by the scales, rounded to its type; `scales` become what it is divided by in fact.
Status QuantizeJob::divide_norm(const BranchSpec& branch, Role role, int layer,
                                std::vector<float>& scales) {
  const models::WeightReader& reader = working_.reader();
  const auto* weight = models::find_shared(reader, branch, role, ".weight", layer);
  if (weight == nullptr) return reader.require(role, ".weight", layer).status();
  const float offset = reader.architecture().norms_less_one ? 1.0f : 0.0f;
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> before, working_.read_all(weight->name));
  std::vector<float> after = before;
  for (size_t c = 0; c < after.size(); ++c) after[c] = (before[c] + offset) / scales[c] - offset;
  FRESHET_RETURN_IF_ERROR(change_tensor(weight->name, after));
  FRESHET_ASSIGN_OR_RETURN(after, working_.read_all(weight->name));
  bool kept = false;
  for (size_t c = 0; c < after.size(); ++c) {
    const float ratio = (before[c] + offset) / (after[c] + offset);
    const bool usable = ratio > 0.0f && ratio < 1e6f && ratio > 1e-6f;
    scales[c] = usable ? ratio : 1.0f;
    if (!usable) after[c] = before[c], kept = true;
  }
  if (kept) FRESHET_RETURN_IF_ERROR(change_tensor(weight->name, after));
  const auto* bias = reader.find(role, ".bias", layer);
  return bias == nullptr ? Status() : divide_vector(bias->name, scales, 0);
}

Status QuantizeJob::divide_vector(const std::string& name, const std::vector<float>& scales,
                                  size_t first) {
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> values, working_.read_all(name));
  for (size_t i = 0; i < scales.size() && first + i < values.size(); ++i)
    values[first + i] /= scales[i];
  return change_tensor(name, values);
}

// Multiplies the columns of matrices that read a norm and are not quantised: routers, gates.
Status QuantizeJob::multiply_columns(const std::string& name, const std::vector<float>& scales) {
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> values, working_.read_all(name));
  for (size_t i = 0; i < values.size(); ++i) values[i] *= scales[i % scales.size()];
  return change_tensor(name, values);
}

// The matrices that read the norm of a branch, and of those behind it that share its input.
Status QuantizeJob::scale_norm(const models::Part& part, int branch,
                               const std::vector<LinearTensor>& linears, std::vector<Work>& work,
                               const PartRunner::Collected& collected) {
  const LayerSpec& layer = working_.model().spec.layers[static_cast<size_t>(part.layer)];
  const BranchSpec& spec = layer.branches[static_cast<size_t>(branch)];
  if (!spec.norms.in || !spec.norms.in->weight) return {};
  // The norm of matrices that layers share is done with these.
  if (spec.sharers.size() > 1 && !part.shared) return {};
  int end = branch + 1;
  while (end < part.first_branch + part.branches &&
         !layer.branches[static_cast<size_t>(end)].norms.in)
    ++end;
  const auto reads = [&](const LinearTensor& t) {
    return t.input == InputOf::kNorm && t.branch >= branch && t.branch < end;
  };
  std::vector<const Work*> readers;
  const InputStats* stats = nullptr;  // of the most tokens
  for (Work& w : work) {
    if (!reads(w.tensor)) continue;
    if (spec.normed_stream && w.note.empty())
      w.note = "not scaled: the norm in front is the residual stream itself";
    readers.push_back(&w);
    if (w.stats != nullptr && (stats == nullptr || w.stats->tokens > stats->tokens))
      stats = w.stats;
  }
  if (readers.empty() || !takes_scales(spec)) return {};
  std::vector<std::string> others;
  for (const LinearTensor& t : linears) {
    if (reads(t) && targets(t).empty()) others.push_back(t.source->name);
  }
  for (int b = branch; b < end; ++b) {
    for (const auto* t :
         models::other_norm_readers(working_.reader(), working_.model().spec, part, b)) {
      others.push_back(t->name);
      const InputStats* all = collected.find(t->name);
      if (all != nullptr && (stats == nullptr || all->tokens > stats->tokens)) stats = all;
    }
  }
  if (stats == nullptr) return {};
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> scales, search_scales(readers, *stats));
  if (scales.empty()) return {};
  FRESHET_RETURN_IF_ERROR(divide_norm(spec, models::norm_roles_of(spec).in, part.layer, scales));
  for (const std::string& name : others) FRESHET_RETURN_IF_ERROR(multiply_columns(name, scales));
  for (Work& w : work) {
    if (reads(w.tensor)) w.scales.columns = scales;
  }
  return {};
}

// A projection out of a layer with states, behind a norm.
Status QuantizeJob::scale_state_norm(Work& reader) {
  const LayerSpec& layer = working_.model().spec.layers[static_cast<size_t>(reader.tensor.layer)];
  const BranchSpec& branch = layer.branches[static_cast<size_t>(reader.tensor.branch)];
  if (reader.tensor.role != Role::kStateOut || reader.stats == nullptr || !ends_in_norm(branch))
    return {};
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> scales, search_scales({&reader}, *reader.stats));
  if (scales.empty()) return {};
  FRESHET_RETURN_IF_ERROR(divide_norm(branch, Role::kStateNorm, reader.tensor.layer, scales));
  reader.scales.columns = scales;
  return {};
}

// A matrix whose inputs another matrix makes, row by row.
Status QuantizeJob::scale_maker(Work& reader, std::vector<Work>& work) {
  const LayerSpec& layer = working_.model().spec.layers[static_cast<size_t>(reader.tensor.layer)];
  const Role role = maker_of(reader.tensor.role);
  if (role == Role::kCount || reader.stats == nullptr) return {};
  const BranchSpec& branch = layer.branches[static_cast<size_t>(reader.tensor.branch)];
  const bool passes = passes_through(branch, reader.tensor.role);
  const auto maker = std::ranges::find_if(work, [&](const Work& w) {
    const bool fused = role == Role::kUp && w.tensor.role == Role::kGateUp;
    return (w.tensor.role == role || fused) && w.tensor.expert == reader.tensor.expert;
  });
  if (!passes || maker == work.end()) return {};
  const int64_t cols = reader.tensor.cols;
  const int64_t first = maker->tensor.rows - cols;  // gates come before ups
  if (first != 0 && first != cols) return {};
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> scales,
                           search_scales({&reader}, *reader.stats));
  if (scales.empty()) return {};
  reader.scales.columns = scales;
  maker->scales.rows.assign(static_cast<size_t>(first), 1.0f);
  maker->scales.rows.insert(maker->scales.rows.end(), scales.begin(), scales.end());
  const auto* bias = working_.reader().find(maker->tensor.role, ".bias", maker->tensor.layer,
                                            maker->tensor.expert);
  return bias == nullptr ? Status() : divide_vector(bias->name, scales, static_cast<size_t>(first));
}

Status QuantizeJob::scale_channels(const models::Part& part,
                                   const std::vector<LinearTensor>& linears,
                                   std::vector<Work>& work, const PartRunner::Collected& collected,
                                   std::vector<StoredTensor>& stored) {
  if (!options_.method.scales_channels()) return {};
  for (int b = part.first_branch; b < part.first_branch + part.branches; ++b)
    FRESHET_RETURN_IF_ERROR(scale_norm(part, b, linears, work, collected));
  for (size_t i = 0; i < work.size() && options_.method.awq; ++i) {
    FRESHET_RETURN_IF_ERROR(scale_maker(work[i], work));
    FRESHET_RETURN_IF_ERROR(scale_state_norm(work[i]));
  }
  for (const std::string& name : changed_) {
    const loader::TensorSource* t = working_.checkpoint().find(name);
    StoredTensor& to = stored.emplace_back();
    to = {"changed|" + name, t->dtype, t->shape, {t->data, t->data + t->bytes}};
  }
  return {};
}

}  // namespace freshet::quantizer

// Scales of input channels (AWQ, SmoothQuant), folded into what makes those inputs: a norm, the
// values of attention, or the up projection of a gated MLP.
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

bool is_attention(Role role) {
  switch (role) {
    case Role::kQuery:
    case Role::kKey:
    case Role::kValue:
    case Role::kQkv:
    case Role::kOutput:
    case Role::kQueryDown:
    case Role::kQueryUp:
    case Role::kKvDown:
    case Role::kKvUp:
    case Role::kStateIn:  // behind the same norm
    case Role::kStateX:
    case Role::kStateOut:
      return true;
    default:
      return false;
  }
}

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
  if (const auto* a = std::get_if<AttentionSpec>(&branch.body))
    return reader == Role::kOutput && a->kv_heads == a->heads;
  if (const auto* mlp = std::get_if<MlpSpec>(&branch.body)) return mlp->gated;
  if (const auto* moe = std::get_if<MoeSpec>(&branch.body)) return moe->glu.limit == 0.0f;
  return false;
}

}  // namespace

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
Status QuantizeJob::divide_norm(const BranchSpec& branch, int layer, std::vector<float>& scales) {
  const models::WeightReader& reader = working_.reader();
  const Role role = models::loading_of(branch).norms.in;
  FRESHET_ASSIGN_OR_RETURN(const auto* weight, reader.require(role, ".weight", layer));
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
  std::vector<bool> covered(2, false);  // MLP, attention
  for (int b = branch; b < part.first_branch + part.branches; ++b) {
    const BranchSpec& one = layer.branches[static_cast<size_t>(b)];
    if (b > branch && one.norms.in) break;
    covered[models::loading_of(one).norms.in == Role::kAttentionIn ? 1 : 0] = true;
  }
  const auto reads = [&](const LinearTensor& t) {
    return t.input == InputOf::kNorm && covered[is_attention(t.role) ? 1 : 0];
  };
  std::vector<const Work*> readers;
  const InputStats* stats = nullptr;  // of the most tokens
  for (const Work& w : work) {
    if (!reads(w.tensor)) continue;
    readers.push_back(&w);
    if (w.stats != nullptr && (stats == nullptr || w.stats->tokens > stats->tokens))
      stats = w.stats;
  }
  std::vector<std::string> others;
  for (const LinearTensor& t : linears) {
    if (reads(t) && targets(t).empty()) others.push_back(t.source->name);
  }
  for (const Role role : {Role::kRouter, Role::kSharedScale}) {
    const auto* t = covered[0] ? working_.reader().find(role, ".weight", part.layer) : nullptr;
    if (t == nullptr) continue;
    others.push_back(t->name);
    if (const InputStats* all = collected.find(t->name)) stats = all;
  }
  if (readers.empty() || stats == nullptr) return {};
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> scales, search_scales(readers, *stats));
  if (scales.empty()) return {};
  FRESHET_RETURN_IF_ERROR(divide_norm(spec, part.layer, scales));
  for (const std::string& name : others) FRESHET_RETURN_IF_ERROR(multiply_columns(name, scales));
  for (Work& w : work) {
    if (reads(w.tensor)) w.scales.columns = scales;
  }
  return {};
}

// A matrix whose inputs another matrix makes, row by row.
Status QuantizeJob::scale_maker(Work& reader, std::vector<Work>& work) {
  const LayerSpec& layer = working_.model().spec.layers[static_cast<size_t>(reader.tensor.layer)];
  const Role role = maker_of(reader.tensor.role);
  if (role == Role::kCount || reader.stats == nullptr) return {};
  const bool passes = std::ranges::any_of(layer.branches, [&](const BranchSpec& b) {
    const bool attention = models::loading_of(b).norms.in == Role::kAttentionIn;
    return attention == is_attention(role) && passes_through(b, reader.tensor.role);
  });
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
  for (size_t i = 0; i < work.size() && options_.method.awq; ++i)
    FRESHET_RETURN_IF_ERROR(scale_maker(work[i], work));
  for (const std::string& name : changed_) {
    const loader::TensorSource* t = working_.checkpoint().find(name);
    StoredTensor& to = stored.emplace_back();
    to = {"changed|" + name, t->dtype, t->shape, {t->data, t->data + t->bytes}};
  }
  return {};
}

}  // namespace freshet::quantizer

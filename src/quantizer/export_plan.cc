#include "quantizer/export_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "quantizer/gguf_hyperparameters.h"

namespace freshet::quantizer {
namespace {

using loader::TensorSource;
using models::Role;
using Order = std::vector<int64_t>;

// Rows of each head in the order (0, half, 1, half + 1 ...), for interleaved RoPE.
Order interleaved(int heads, int head_dim) {
  Order order;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      order.push_back(h * head_dim + i);
      order.push_back(h * head_dim + head_dim / 2 + i);
    }
  }
  return order;
}

// From (queries, key, value) per key-value head to all queries, all keys, all values.
Order unfused(const AttentionSpec& a) {
  const int64_t queries = int64_t{a.heads} / a.kv_heads * a.head_dim;
  const int64_t sizes[] = {queries, a.head_dim, a.value_dim};
  const int64_t group = sizes[0] + sizes[1] + sizes[2];
  Order order;
  int64_t offset = 0;
  for (const int64_t size : sizes) {
    for (int64_t g = 0; g < a.kv_heads; ++g) {
      for (int64_t i = 0; i < size; ++i) order.push_back(g * group + offset + i);
    }
    offset += size;
  }
  return order;
}

// Of a tower for pictures, under the names of all families.
bool is_tower_tensor(std::string_view name) {
  if (name.starts_with("model.")) name.remove_prefix(6);
  constexpr std::string_view kStarts[] = {"vision_tower.", "vision_model.", "visual.",
                                          "multi_modal_projector.", "connector."};
  return std::ranges::any_of(kStarts, [&](std::string_view s) { return name.starts_with(s); });
}

}  // namespace

int64_t Planned::rows() const {
  int64_t n = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) n *= shape[i];
  return n;
}

bool Planned::has_own_rows() const {
  return columns.empty() &&
         std::ranges::all_of(parts, [](const Part& p) { return p.factor == 1.0f; });
}

ExportPlanner::ExportPlanner(const models::WeightReader& reader,
                             const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                             const Recipe& recipe, const RecipeOverrides* overrides,
                             bool importance)
    : reader_(reader),
      checkpoint_(checkpoint),
      spec_(spec),
      recipe_(recipe),
      overrides_(overrides),
      importance_(importance),
      names_(models::WeightNames::gguf(reader.architecture().gguf_names)) {}

std::string ExportPlanner::gguf_name(Role role, int layer, const char* suffix) const {
  // Where branches share a norm, it has the second of two names.
  if (layer >= 0) {
    const LayerSpec& spec = spec_.layers[static_cast<size_t>(layer)];
    const bool shared = spec.parallel && !spec.branches.back().norms.in;
    const std::string second = shared ? names_.stem(role, layer, -1, 1) : "";
    if (!second.empty()) return second + suffix;
  }
  return names_.stem(role, layer) + suffix;
}

void ExportPlanner::add(Role role, int layer, const char* suffix, const TensorSource& source,
                        Order order) {
  used_.insert(source.name);
  Planned p;
  p.name = gguf_name(role, layer, suffix);
  p.shape = source.shape;
  p.transposed = reader_.architecture().transposed && layer >= 0 && p.shape.size() == 2;
  if (p.transposed) std::swap(p.shape[0], p.shape[1]);
  // In a vector, each number is a row.
  const int64_t rows = p.shape.size() > 1 ? p.rows() : p.cols();
  if (p.shape.size() > 1 || !order.empty()) {
    p.parts.push_back({&source, 0, rows, std::move(order)});
  } else {
    p.parts.push_back({&source, 0, 1, {}});
  }
  out_.push_back(std::move(p));
}

Status ExportPlanner::linear(Role role, int layer) {
  for (const char* suffix : {".weight", ".bias"}) {
    if (const TensorSource* t = reader_.find(role, suffix, layer);
        t != nullptr && !used_.contains(t->name))
      add(role, layer, suffix, *t);
  }
  return {};
}

Status ExportPlanner::norm(Role role, int layer) {
  for (const char* suffix : {".weight", ".bias"}) {
    const TensorSource* t = reader_.find(role, suffix, layer);
    if (t == nullptr || used_.contains(t->name)) continue;
    add(role, layer, suffix, *t);
    if (reader_.architecture().norms_less_one && suffix == std::string_view(".weight"))
      out_.back().offset = 1.0f;
  }
  return {};
}

Status ExportPlanner::branch(const AttentionSpec& a, int layer) {
  const bool turn = reader_.architecture().gguf_interleaves;
  const bool per_group = reader_.architecture().fused_qkv == models::FusedQkv::kPerGroup;
  for (const char* suffix : {".weight", ".bias"}) {
    const auto put = [&](Role role, Order order) {
      const TensorSource* t = reader_.find(role, suffix, layer);
      if (t != nullptr && !used_.contains(t->name)) add(role, layer, suffix, *t, std::move(order));
    };
    put(Role::kQkv, per_group ? unfused(a) : Order{});
    put(Role::kQuery, turn ? interleaved(a.heads, a.head_dim) : Order{});
    put(Role::kKey, turn ? interleaved(a.kv_heads, a.head_dim) : Order{});
  }
  FRESHET_RETURN_IF_ERROR(linear(Role::kValue, layer));
  FRESHET_RETURN_IF_ERROR(linear(Role::kOutput, layer));
  FRESHET_RETURN_IF_ERROR(norm(Role::kQueryNorm, layer));
  return norm(Role::kKeyNorm, layer);
}

// One tensor [experts, rows, cols] from one tensor per expert, or the file's own stacked tensor.
Status ExportPlanner::stacked(const MoeSpec& moe, Role own, Role together, int layer) {
  if (const TensorSource* t = reader_.find(together, ".weight", layer)) {
    add(together, layer, ".weight", *t);
    return {};
  }
  Planned p;
  p.name = gguf_name(together, layer, ".weight");
  for (int e = 0; e < moe.routing.experts; ++e) {
    FRESHET_ASSIGN_OR_RETURN(const TensorSource* t, reader_.require(own, ".weight", layer, e));
    if (t->shape.size() != 2) return invalid_argument("tensor '{}' is not a matrix", t->name);
    used_.insert(t->name);
    p.shape = {moe.routing.experts, t->shape[0], t->shape[1]};
    p.parts.push_back({t, 0, t->shape[0], {}});
  }
  out_.push_back(std::move(p));
  return {};
}

// Splits [experts, 2 * ff, hidden], gates first, into two tensors.
Status ExportPlanner::split_gate_up(const TensorSource& source, int layer) {
  if (source.shape.size() != 3 || source.shape[1] % 2 != 0 ||
      reader_.architecture().experts_transposed)
    return unsupported("tensor '{}' has a layout that cannot be converted", source.name);
  used_.insert(source.name);
  const int64_t experts = source.shape[0], ff = source.shape[1] / 2;
  int64_t first = 0;
  for (const Role role : {Role::kExpertsGate, Role::kExpertsUp}) {
    Planned p;
    p.name = gguf_name(role, layer, ".weight");
    p.shape = {experts, ff, source.shape[2]};
    for (int64_t e = 0; e < experts; ++e) p.parts.push_back({&source, e * 2 * ff + first, ff, {}});
    out_.push_back(std::move(p));
    first = ff;
  }
  return {};
}

// Splits [2 * ff, hidden], gates first, into two tensors.
Status ExportPlanner::split_rows(Role both, Role first, Role second, int layer) {
  const TensorSource* const t = reader_.find(both, ".weight", layer);
  if (t == nullptr) return {};
  if (t->shape.size() != 2 || t->shape[0] % 2 != 0 || reader_.find(both, ".bias", layer) != nullptr)
    return unsupported("tensor '{}' has a layout that cannot be converted", t->name);
  used_.insert(t->name);
  const int64_t rows = t->shape[0] / 2;
  for (const Role role : {first, second}) {
    Planned p;
    p.name = gguf_name(role, layer, ".weight");
    p.shape = {rows, t->shape[1]};
    p.parts.push_back({t, role == first ? 0 : rows, rows, {}});
    out_.push_back(std::move(p));
  }
  return {};
}

Status ExportPlanner::branch(const MoeSpec& moe, int layer) {
  FRESHET_RETURN_IF_ERROR(linear(Role::kRouter, layer));
  if (moe.router_correction) {
    const TensorSource* t = reader_.find(Role::kRouterCorrection, "", layer);
    if (t == nullptr) {
      FRESHET_ASSIGN_OR_RETURN(t, reader_.require(Role::kRouterCorrection, ".bias", layer));
    }
    add(Role::kRouterCorrection, layer, ".bias", *t);
    out_.back().shape = {t->elements()};
  }
  for (const Role role :
       {Role::kSharedGate, Role::kSharedUp, Role::kSharedDown, Role::kSharedScale})
    FRESHET_RETURN_IF_ERROR(linear(role, layer));
  FRESHET_RETURN_IF_ERROR(
      split_rows(Role::kSharedGateUp, Role::kSharedGate, Role::kSharedUp, layer));
  if (const TensorSource* fused = reader_.find(Role::kExpertsGateUp, ".weight", layer)) {
    FRESHET_RETURN_IF_ERROR(split_gate_up(*fused, layer));
  } else {
    FRESHET_RETURN_IF_ERROR(stacked(moe, Role::kExpertGate, Role::kExpertsGate, layer));
    FRESHET_RETURN_IF_ERROR(stacked(moe, Role::kExpertUp, Role::kExpertsUp, layer));
  }
  return stacked(moe, Role::kExpertDown, Role::kExpertsDown, layer);
}

Status ExportPlanner::branch(const MlaSpec&, int) {
  return unsupported("converting latent attention to GGUF is not supported");
}

// A tensor in F32, of another shape than its source.
Status ExportPlanner::values(Role role, int layer, const char* suffix, const TensorSource& source,
                             std::vector<int64_t> shape) {
  Planned p;
  FRESHET_ASSIGN_OR_RETURN(p.values, reader_.values(source, source.elements()));
  used_.insert(source.name);
  p.name = gguf_name(role, layer, suffix);
  p.shape = std::move(shape);
  out_.push_back(std::move(p));
  return {};
}

Status ExportPlanner::branch(const LightningSpec&, int) {
  return unsupported("converting lightning attention to GGUF is not supported");
}

Status ExportPlanner::branch(const LinearSpec&, int) {
  return unsupported("converting side streams to GGUF is not supported");
}

Status ExportPlanner::branch(const CrossAttentionSpec&, int) {
  return unsupported("converting models with cross-attention to GGUF is not supported");
}

Status ExportPlanner::branch(const MlpSpec& mlp, int layer) {
  if (mlp.xielu) {  // in the metadata: gguf_families.h
    for (const Role role :
         {Role::kXieluPositive, Role::kXieluNegative, Role::kXieluBeta, Role::kXieluEps}) {
      if (const TensorSource* t = reader_.find(role, "", layer)) used_.insert(t->name);
    }
  }
  if (names_.stem(Role::kGateUp, layer).empty()) {
    FRESHET_RETURN_IF_ERROR(split_rows(Role::kGateUp, Role::kGate, Role::kUp, layer));
  } else {
    FRESHET_RETURN_IF_ERROR(linear(Role::kGateUp, layer));
  }
  for (const Role role : {Role::kGate, Role::kUp, Role::kDown})
    FRESHET_RETURN_IF_ERROR(linear(role, layer));
  return {};
}

Status ExportPlanner::layer(int layer) {
  for (const Role role : {Role::kAttentionIn, Role::kAttentionOut, Role::kAttentionAfter,
                          Role::kMlpIn, Role::kMlpOut, Role::kMlpAfter})
    FRESHET_RETURN_IF_ERROR(norm(role, layer));
  for (const BranchSpec& branch : spec_.layers[static_cast<size_t>(layer)].branches) {
    FRESHET_RETURN_IF_ERROR(
        std::visit([&](const auto& body) { return this->branch(body, layer); }, branch.body));
  }
  return {};
}

Status ExportPlanner::global() {
  FRESHET_RETURN_IF_ERROR(linear(Role::kEmbedding, -1));
  FRESHET_RETURN_IF_ERROR(linear(Role::kPositions, -1));
  FRESHET_RETURN_IF_ERROR(norm(Role::kFinalNorm, -1));
  if (!spec_.tied_embeddings) FRESHET_RETURN_IF_ERROR(linear(Role::kHead, -1));
  return {};
}

void ExportPlanner::divisors() {
  const auto put = [&](const char* name, std::vector<float> values) {
    Planned p;
    p.name = name;
    p.shape = {std::ssize(values)};
    p.values = std::move(values);
    out_.push_back(std::move(p));
  };
  for (const RopeSpec& rope : spec_.ropes) {
    if (rope.scaling == RopeSpec::Scaling::kLlama3) put("rope_freqs.weight", llama3_divisors(rope));
    if (rope.scaling == RopeSpec::Scaling::kLongRope) {
      put("rope_factors_long.weight", rope.long_factors);
      put("rope_factors_short.weight", rope.short_factors);
    }
    if (rope.scaling == RopeSpec::Scaling::kLlama3 || rope.scaling == RopeSpec::Scaling::kLongRope)
      return;
  }
}

// Buffers that a model can recompute, a head equal to the embedding, layers behind the last one
// (they draft further tokens), a tower for pictures, and scales of keys and values are not written.
Status ExportPlanner::all_used() const {
  const std::string behind = fmt::format("model.layers.{}.", spec_.layers.size());
  for (const TensorSource& t : checkpoint_.tensors()) {
    const bool made_again = t.name.ends_with("rotary_emb.inv_freq") ||
                            t.name.ends_with("attn.masked_bias") ||
                            t.name.ends_with(".attn.bias") || t.name.ends_with("attention.bias");
    const bool tied_head = spec_.tied_embeddings && t.name.ends_with("lm_head.weight");
    const bool drafts = t.name.starts_with(behind) || t.name.starts_with("mtp.");
    const bool kv_scale = loader::is_kv_factor(t.name);
    const bool tower = spec_.vision != nullptr && is_tower_tensor(t.name);
    if (!used_.contains(t.name) && !made_again && !tied_head && !drafts && !tower && !kv_scale)
      return unsupported("tensor '{}' has no place in a GGUF file of this architecture", t.name);
  }
  return {};
}

RecipeModel ExportPlanner::recipe_model() const {
  RecipeModel model;
  model.layers = static_cast<int>(spec_.layers.size());
  model.tied = spec_.tied_embeddings;
  model.importance = importance_;
  for (const LayerSpec& layer : spec_.layers) {
    if (const auto* moe = layer.find<MoeSpec>()) model.experts = moe->routing.experts;
  }
  if (spec_.layers.empty()) return model;
  if (const auto* a = spec_.layers.front().find<AttentionSpec>(); a != nullptr && a->kv_heads > 0)
    model.heads_per_kv_head = a->heads / a->kv_heads;
  return model;
}

Status ExportPlanner::choose_formats(const Warn& warn) {
  std::vector<RecipeTensor> tensors;
  for (const Planned& p : out_) tensors.push_back({p.name, p.shape});
  static const RecipeOverrides kNone;
  FRESHET_ASSIGN_OR_RETURN(
      const std::vector<quant::Format> formats,
      recipe_.formats(recipe_model(), tensors, overrides_ != nullptr ? *overrides_ : kNone, warn));
  for (size_t i = 0; i < out_.size(); ++i) out_[i].format = formats[i];
  return {};
}

Result<std::vector<Planned>> ExportPlanner::plan(const Warn& warn) {
  FRESHET_RETURN_IF_ERROR(global());
  for (size_t l = 0; l < spec_.layers.size(); ++l)
    FRESHET_RETURN_IF_ERROR(layer(static_cast<int>(l)));
  divisors();
  FRESHET_RETURN_IF_ERROR(fold_multipliers());
  FRESHET_RETURN_IF_ERROR(all_used());
  FRESHET_RETURN_IF_ERROR(choose_formats(warn));
  return std::move(out_);
}

}  // namespace freshet::quantizer

// The plan's tensors of layers with states, and of Falcon-H1's multipliers, which go into weights.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "models/config.h"
#include "models/state_rows.h"
#include "quantizer/export_plan.h"

namespace freshet::quantizer {

using loader::TensorSource;
using models::Role;
using Order = std::vector<int64_t>;

// A convolution [channels, taps].
Status ExportPlanner::convolution(int layer, Order order) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* t,
                           reader_.require(Role::kStateConv, ".weight", layer));
  add(Role::kStateConv, layer, ".weight", *t, std::move(order));
  std::vector<int64_t>& shape = out_.back().shape;
  if (shape.size() == 3) shape = {shape[0], shape[2]};
  if (const TensorSource* bias = reader_.find(Role::kStateConv, ".bias", layer))
    add(Role::kStateConv, layer, ".bias", *bias);
  return {};
}

// Rates of decay, with their sign.
Status ExportPlanner::decay(int layer, std::vector<int64_t> shape) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* a, reader_.require(Role::kStateA, ".weight", layer));
  FRESHET_RETURN_IF_ERROR(values(Role::kStateA, layer, "", *a, std::move(shape)));
  for (float& rate : out_.back().values) rate = -std::exp(rate);
  return {};
}

// Readers of the format have no biases of these.
Status ExportPlanner::no_biases(std::initializer_list<Role> roles, int layer) const {
  for (const Role role : roles) {
    if (const TensorSource* t = reader_.find(role, ".bias", layer))
      return unsupported("tensor '{}' has no place in a GGUF file of this architecture", t->name);
  }
  return {};
}

Status ExportPlanner::branch(const ShortConvSpec& conv, int layer) {
  if (conv.bias) return unsupported("'conv_bias' has no place in a GGUF file");
  FRESHET_RETURN_IF_ERROR(linear(Role::kStateIn, layer));
  FRESHET_RETURN_IF_ERROR(linear(Role::kStateOut, layer));
  return convolution(layer);
}

Status ExportPlanner::branch(const MambaSpec& mamba, int layer) {
  if (reader_.architecture().type == "jamba")
    FRESHET_RETURN_IF_ERROR(no_biases({Role::kStateIn, Role::kStateOut}, layer));
  for (const Role role : {Role::kStateIn, Role::kStateX, Role::kStateDt, Role::kStateOut})
    FRESHET_RETURN_IF_ERROR(linear(role, layer));
  for (const Role role : {Role::kStateDtNorm, Role::kStateBNorm, Role::kStateCNorm})
    FRESHET_RETURN_IF_ERROR(norm(role, layer));
  FRESHET_RETURN_IF_ERROR(convolution(layer));
  FRESHET_RETURN_IF_ERROR(decay(layer, {mamba.inner, mamba.state}));
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* d, reader_.require(Role::kStateD, ".weight", layer));
  return values(Role::kStateD, layer, "", *d, {d->elements()});
}

Status ExportPlanner::branch(const Mamba2Spec& mamba, int layer) {
  FRESHET_RETURN_IF_ERROR(no_biases({Role::kStateIn, Role::kStateOut}, layer));
  FRESHET_RETURN_IF_ERROR(linear(Role::kStateIn, layer));
  FRESHET_RETURN_IF_ERROR(linear(Role::kStateOut, layer));
  if (mamba.norm) {
    if (mamba.norm_before_gate)
      return unsupported("'mamba_norm_before_gate' has no place in a GGUF file");
    FRESHET_ASSIGN_OR_RETURN(const TensorSource* norm,
                             reader_.require(Role::kStateNorm, ".weight", layer));
    FRESHET_RETURN_IF_ERROR(values(Role::kStateNorm, layer, ".weight", *norm,
                                   {mamba.groups, mamba.inner() / mamba.groups}));
  }
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* bias,
                           reader_.require(Role::kStateDtBias, ".weight", layer));
  add(Role::kStateDtBias, layer, ".bias", *bias);
  FRESHET_RETURN_IF_ERROR(convolution(layer));
  FRESHET_RETURN_IF_ERROR(decay(layer, {mamba.heads, 1}));
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* d, reader_.require(Role::kStateD, ".weight", layer));
  return values(Role::kStateD, layer, "", *d, {d->elements(), 1});
}

// Qwen3-Next has queries, keys, values and gates key head by key head in one matrix, of which the
// format wants the gates apart. Qwen3.5 has them as the format wants, but for the value heads.
Status ExportPlanner::delta_in(const DeltaNetSpec& net, int layer) {
  const int64_t ratio = net.value_heads / net.key_heads, dim = net.value_dim;
  if (reader_.find(Role::kStateZ, ".weight", layer) != nullptr) {
    const auto put = [&](Role role, int64_t size, int64_t before) -> Status {
      FRESHET_ASSIGN_OR_RETURN(const TensorSource* t, reader_.require(role, ".weight", layer));
      add(role, layer, ".weight", *t, models::tiled_rows(net.key_heads, ratio, size, before));
      return {};
    };
    FRESHET_RETURN_IF_ERROR(put(Role::kStateIn, dim, 2 * int64_t{net.keys()}));
    FRESHET_RETURN_IF_ERROR(put(Role::kStateZ, dim, 0));
    FRESHET_RETURN_IF_ERROR(put(Role::kStateGates, 1, 0));
    return put(Role::kStateDt, 1, 0);
  }
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* t,
                           reader_.require(Role::kStateIn, ".weight", layer));
  const Order all =
      models::rows_by_part(net.key_heads, {net.key_dim, net.key_dim, ratio * dim, ratio * dim});
  const auto conv = 2 * net.keys() + net.values();
  if (t->shape.size() != 2 || t->shape[0] != std::ssize(all))
    return unsupported("tensor '{}' has a layout that cannot be converted", t->name);
  used_.insert(t->name);
  int64_t first = 0;
  for (const auto& [role, rows] :
       {std::pair{Role::kStateIn, int64_t{conv}}, {Role::kStateZ, int64_t{net.values()}}}) {
    Planned p;
    p.name = gguf_name(role, layer, ".weight");
    p.shape = {rows, t->shape[1]};
    p.parts.push_back({t, 0, rows, Order(all.begin() + first, all.begin() + first + rows)});
    out_.push_back(std::move(p));
    first += rows;
  }
  return linear(Role::kStateGates, layer);
}

Status ExportPlanner::branch(const DeltaNetSpec& net, int layer) {
  if (net.key_dim != net.value_dim)
    return unsupported("'linear_value_head_dim' has no place in a GGUF file: it must be the keys'");
  const bool tiled = reader_.find(Role::kStateZ, ".weight", layer) != nullptr;
  const int64_t ratio = net.value_heads / net.key_heads;
  // The order of rows of value heads of this size; empty: as they are.
  const auto heads = [&](int64_t size, int64_t before) {
    return tiled ? models::tiled_rows(net.key_heads, ratio, size, before) : Order();
  };
  FRESHET_RETURN_IF_ERROR(delta_in(net, layer));
  FRESHET_RETURN_IF_ERROR(convolution(layer, heads(net.value_dim, 2 * int64_t{net.keys()})));
  FRESHET_RETURN_IF_ERROR(decay(layer, {net.value_heads}));
  const std::vector<float> rates = out_.back().values;
  const Order order = heads(1, 0);
  for (size_t i = 0; i < order.size(); ++i)
    out_.back().values[i] = rates[static_cast<size_t>(order[i])];
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* bias,
                           reader_.require(Role::kStateDtBias, ".weight", layer));
  add(Role::kStateDtBias, layer, ".bias", *bias, order);
  // This norm's weight is stored as it is, whatever the others are.
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* norm,
                           reader_.require(Role::kStateNorm, ".weight", layer));
  add(Role::kStateNorm, layer, ".weight", *norm);
  FRESHET_RETURN_IF_ERROR(linear(Role::kStateOut, layer));
  out_.back().columns = heads(net.value_dim, 0);
  return {};
}

// Falcon-H1's multipliers, in the weights that they precede or follow.
Status ExportPlanner::fold_multipliers() {
  if (reader_.architecture().type != "falcon_h1") return {};
  models::Config c(checkpoint_.config());
  const auto number = [&](const char* key) { return static_cast<float>(c.number({key}, 1.0)); };
  const float in = number("attention_in_multiplier");
  const std::vector<float> mlp = c.floats({"mlp_multipliers"});
  const std::pair<std::string_view, float> factors[] = {
      {"token_embd.", number("embedding_multiplier")},
      {"output.", number("lm_head_multiplier")},
      {".attn_q.", in},
      {".attn_k.", in * number("key_multiplier")},
      {".attn_v.", in},
      {".attn_output.", number("attention_out_multiplier")},
      {".ssm_out.", number("ssm_out_multiplier")},
      {".ffn_gate.", mlp.size() == 2 ? mlp[0] : 1.0f},
      {".ffn_down.", mlp.size() == 2 ? mlp[1] : 1.0f}};
  FRESHET_RETURN_IF_ERROR(c.status());
  if (spec_.tied_embeddings && factors[0].second != factors[1].second)
    return unsupported("tied embeddings with two multipliers have no place in a GGUF file");
  for (Planned& p : out_) {
    for (const auto& [name, factor] : factors) {
      const bool own =
          name.front() == '.' ? p.name.find(name) != std::string::npos : p.name.starts_with(name);
      for (Planned::Part& part : p.parts) part.factor *= own ? factor : 1.0f;
    }
    // Readers of this architecture know this norm without a suffix.
    if (p.name.ends_with(".ffn_norm.weight")) p.name.resize(p.name.size() - 7);
    if (!p.name.ends_with(".ssm_in.weight")) continue;
    const Mamba2Spec& m = *spec_.layers.front().find<Mamba2Spec>();
    const int64_t bc = int64_t{m.groups} * m.state;
    const int64_t sizes[] = {m.inner(), m.inner(), bc, bc, m.heads};
    const TensorSource* const source = p.parts.front().source;
    p.parts.clear();
    int64_t first = 0;
    for (size_t i = 0; i < m.part_scale.size(); first += sizes[i++])
      p.parts.push_back({source, first, sizes[i], {}, m.part_scale[i]});
  }
  return {};
}

}  // namespace freshet::quantizer

#include <algorithm>
#include <cmath>
#include <limits>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace zamba2_model {

// Whether each layer has a shared block beside its Mamba-2.
std::vector<bool> hybrid_layers(Config& c, size_t layers) {
  const std::vector<std::string> kinds = c.texts({"layers_block_type", "layer_types"});
  std::vector<bool> hybrid(layers, false);
  if (kinds.empty()) {
    for (const size_t at : {6, 12, 18, 24, 30, 36, 42, 47, 51})
      if (at < layers) hybrid[at] = true;
    return hybrid;
  }
  if (kinds.size() < layers) {
    c.fail(invalid_argument("the configuration's 'layers_block_type' lists {} of {} layers",
                            kinds.size(), layers));
    return hybrid;
  }
  for (size_t i = 0; i < layers; ++i) {
    hybrid[i] = kinds[i] == "hybrid";
    if (!hybrid[i] && kinds[i] != "mamba" && kinds[i] != "linear_attention")
      c.fail(unsupported("unsupported kind of layer '{}'", kinds[i]));
  }
  return hybrid;
}

Mamba2Spec read_mamba(Config& c, int hidden) {
  Mamba2Spec m;
  const int64_t inner = int64_t{c.size({"mamba_expand"}, 2)} * hidden;
  constexpr int64_t kMost = 1 << 24;
  if (inner > kMost) {
    c.fail(invalid_argument("the configuration has {} Mamba channels", inner));
    return m;
  }
  m.heads = c.size({"n_mamba_heads"}, 8);
  m.head_dim = static_cast<int>(inner / m.heads);
  if (m.inner() != inner) {
    c.fail(
        invalid_argument("the configuration has {} channels for {} Mamba heads", inner, m.heads));
  }
  m.groups = m.norm_groups = c.size({"mamba_ngroups"}, 1);
  m.state = c.size({"mamba_d_state"}, 64);
  m.taps = c.size({"mamba_d_conv"}, 4);
  m.proj_bias = c.flag({"add_bias_linear"}, false);
  m.norm = NormSpec{.eps = 1e-5f};
  m.dt_min = static_cast<float>(c.number({"time_step_min"}, 0.001));
  m.dt_max = std::numeric_limits<float>::max();
  return m;
}

// A hybrid layer: attention over [x; embeddings], an MLP and a projection, one after the other and
// without residuals, whose result is only added to what the layer's Mamba-2 reads.
LayerSpec hybrid_layer(const BranchSpec& attention, const BranchSpec& mlp,
                       const BranchSpec& mamba) {
  LayerSpec layer;
  layer.branches = {attention, mlp, {.body = LinearSpec{}}, mamba};
  layer.branches[0].side = Side::kOpens;
  layer.branches[1].side = layer.branches[2].side = Side::kContinues;
  layer.branches[3].side = Side::kCloses;
  return layer;
}

// `blocks` shared blocks serve the hybrid layers in turns.
void share_blocks(ModelSpec& s, const std::vector<bool>& hybrid, int blocks) {
  std::vector<std::vector<int>> sharers(static_cast<size_t>(blocks));
  for (int pass = 0; pass < 2; ++pass) {
    int use = 0;
    for (size_t i = 0; i < s.layers.size(); ++i) {
      if (!hybrid[i]) continue;
      std::vector<int>& own = sharers[static_cast<size_t>(use % blocks)];
      if (pass == 0) own.push_back(static_cast<int>(i));
      for (size_t b = 0; pass == 1 && b < 2; ++b) {
        s.layers[i].branches[b].sharers = own;
        s.layers[i].branches[b].use = use;
      }
      ++use;
    }
  }
}

ModelSpec spec(Config& c) {
  const int hidden = c.size({"hidden_size"}, 2560);
  const int heads = c.size({"num_attention_heads"}, 32);
  const bool rotates = c.flag({"use_mem_rope"}, false);
  const bool extended = c.flag({"use_long_context"}, false);
  ModelSpec s = decoder_spec(c, "zamba2",
                             {.hidden = hidden,
                              .layers = 54,
                              .head_dim = 2 * hidden / heads,
                              .ff = 4 * hidden,
                              .context = 4096,
                              .tied = true,
                              .eps = 1e-5,
                              .activation = "gelu",
                              .rotary = rotates});
  const LayerSpec both = s.layers.front();
  BranchSpec attention = both.branches[0], mlp = both.branches[1];
  AttentionSpec& a = std::get<AttentionSpec>(attention.body);
  const int dim = a.head_dim;
  a.scale = static_cast<float>(1.0 / std::sqrt(dim / 2.0));
  a.input_size = 2 * hidden;
  if (extended) s.max_context = 16384;
  if (extended && rotates) s.ropes[0].theta *= std::pow(8.0, dim / (dim - 2.0));
  const int rank = c.size({"adapter_rank"}, 128);
  if (c.flag({"use_shared_attention_adapter"}, false)) a.adapter_rank = rank;
  MlpSpec& m = std::get<MlpSpec>(mlp.body);
  m.adapter_rank = rank;
  m.bias = c.flag({"add_bias_linear"}, false);
  const BranchSpec mamba{.norms = {.in = s.final_norm}, .body = read_mamba(c, hidden)};
  const std::vector<bool> hybrid = hybrid_layers(c, s.layers.size());
  for (size_t i = 0; i < s.layers.size(); ++i) {
    if (hybrid[i]) {
      s.layers[i] = hybrid_layer(attention, mlp, mamba);
    } else {
      s.layers[i].branches = {mamba};
    }
  }
  const auto uses = static_cast<int>(std::max<int64_t>(std::ranges::count(hybrid, true), 1));
  share_blocks(s, hybrid, std::min(c.size({"num_mem_blocks"}, 1), uses));
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kFinalNorm, "model.final_layernorm"},
    {Role::kAttentionIn,
     "model.layers.{}.input_layernorm|model.layers.{}.mamba_decoder.input_layernorm"},
    {Role::kStateIn, "model.layers.{}.mamba.in_proj|model.layers.{}.mamba_decoder.mamba.in_proj"},
    {Role::kStateConv, "model.layers.{}.mamba.conv1d|model.layers.{}.mamba_decoder.mamba.conv1d"},
    {Role::kStateDtBias,
     "model.layers.{}.mamba.dt_bias|model.layers.{}.mamba_decoder.mamba.dt_bias"},
    {Role::kStateA, "model.layers.{}.mamba.A_log|model.layers.{}.mamba_decoder.mamba.A_log"},
    {Role::kStateD, "model.layers.{}.mamba.D|model.layers.{}.mamba_decoder.mamba.D"},
    {Role::kStateNorm, "model.layers.{}.mamba.norm|model.layers.{}.mamba_decoder.mamba.norm"},
    {Role::kStateOut,
     "model.layers.{}.mamba.out_proj|model.layers.{}.mamba_decoder.mamba.out_proj"},
    {Role::kSideIn, "model.layers.{}.shared_transformer.input_layernorm"},
    {Role::kQuery, "model.layers.{}.shared_transformer.self_attn.q_proj"},
    {Role::kKey, "model.layers.{}.shared_transformer.self_attn.k_proj"},
    {Role::kValue, "model.layers.{}.shared_transformer.self_attn.v_proj"},
    {Role::kOutput, "model.layers.{}.shared_transformer.self_attn.o_proj"},
    {Role::kQueryAdapterDown,
     "model.layers.{}.shared_transformer.self_attn.linear_q_adapter_list.{e}.0"},
    {Role::kQueryAdapterUp,
     "model.layers.{}.shared_transformer.self_attn.linear_q_adapter_list.{e}.1"},
    {Role::kKeyAdapterDown,
     "model.layers.{}.shared_transformer.self_attn.linear_k_adapter_list.{e}.0"},
    {Role::kKeyAdapterUp,
     "model.layers.{}.shared_transformer.self_attn.linear_k_adapter_list.{e}.1"},
    {Role::kValueAdapterDown,
     "model.layers.{}.shared_transformer.self_attn.linear_v_adapter_list.{e}.0"},
    {Role::kValueAdapterUp,
     "model.layers.{}.shared_transformer.self_attn.linear_v_adapter_list.{e}.1"},
    {Role::kMlpIn, "model.layers.{}.shared_transformer.pre_ff_layernorm"},
    {Role::kGateUp, "model.layers.{}.shared_transformer.feed_forward.gate_up_proj"},
    {Role::kDown, "model.layers.{}.shared_transformer.feed_forward.down_proj"},
    {Role::kGateUpAdapterDown,
     "model.layers.{}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{e}.0"},
    {Role::kGateUpAdapterUp,
     "model.layers.{}.shared_transformer.feed_forward.gate_up_proj_adapter_list.{e}.1"},
    {Role::kSideLinear, "model.layers.{}.linear"},
};

}  // namespace zamba2_model

Architecture zamba2() {
  return {.type = "zamba2", .spec = zamba2_model::spec, .names = zamba2_model::kNames};
}

}  // namespace freshet::models

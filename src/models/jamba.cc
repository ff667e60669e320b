#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace jamba_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "jamba", {.vocab = 65536, .kv_heads = 8, .ff = 14336, .context = 262144, .rotary = false});
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.experts = c.size({"num_experts", "num_local_experts"}, 16);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 2);
  const int experts = c.size({"expert_layer_period"}, 2);
  const int experts_from = c.count({"expert_layer_offset"}, 1);
  set_experts(s, moe, [&](int layer) {
    return moe.routing.experts > 1 && (layer - experts_from) % experts == 0;
  });

  MambaSpec m;
  m.inner = c.size({"mamba_expand"}, 2) * s.hidden_size;
  m.state = c.size({"mamba_d_state"}, 16);
  m.taps = c.size({"mamba_d_conv"}, 4);
  m.dt_rank = read_dt_rank(c, {"mamba_dt_rank"}, s.hidden_size);
  m.conv_bias = c.flag({"mamba_conv_bias"}, true);
  m.proj_bias = c.flag({"mamba_proj_bias"}, false);
  m.inner_norm = s.final_norm;
  const int period = c.size({"attn_layer_period"}, 8);
  const int first = c.count({"attn_layer_offset"}, 4);
  set_state_layers(s, m, [&](int layer) { return (layer - first) % period == 0; });
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kFinalNorm, "model.final_layernorm"},
    {Role::kMlpIn, "model.layers.{}.pre_ff_layernorm"},
    {Role::kGate, "model.layers.{}.feed_forward.gate_proj"},
    {Role::kUp, "model.layers.{}.feed_forward.up_proj"},
    {Role::kDown, "model.layers.{}.feed_forward.down_proj"},
    {Role::kRouter, "model.layers.{}.feed_forward.router"},
    {Role::kExpertGate, "model.layers.{}.feed_forward.experts.{e}.gate_proj"},
    {Role::kExpertUp, "model.layers.{}.feed_forward.experts.{e}.up_proj"},
    {Role::kExpertDown, "model.layers.{}.feed_forward.experts.{e}.down_proj"},
};

}  // namespace jamba_model

Architecture jamba() {
  return {.type = "jamba", .spec = jamba_model::spec, .names = jamba_model::kNames};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace deepseek_v2_model {

constexpr NameRule kNames[] = {
    {Role::kSharedGate, "model.layers.{}.mlp.shared_experts.gate_proj"},
    {Role::kSharedUp, "model.layers.{}.mlp.shared_experts.up_proj"},
    {Role::kSharedDown, "model.layers.{}.mlp.shared_experts.down_proj"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "deepseek_v2", {.vocab = 102400});
  set_latent_attention(c, s, 1536);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (LayerSpec& layer : s.layers) layer.mlp().bias = mlp_bias;

  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 1407);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = moe.expert_ff * c.count({"n_shared_experts"}, 2);
  moe.routing.experts = c.size({"n_routed_experts", "num_experts"}, 64);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 6);
  moe.routing.scale = static_cast<float>(c.number({"routed_scaling_factor"}, 1));
  const std::string method = c.text({"topk_method"}, "greedy");
  if (method == "group_limited_greedy") {
    moe.routing.groups = c.size({"n_group"}, 1);
    moe.routing.top_groups = c.size({"topk_group"}, 1);
  } else if (method != "greedy") {
    c.fail(unsupported("unsupported way of choosing experts '{}'", method));
  }
  const int first = c.count({"first_k_dense_replace"}, 0);
  const int step = c.size({"moe_layer_freq"}, 1);
  set_experts(s, moe, [&](int layer) { return layer >= first && layer % step == 0; });
  return s;
}

}  // namespace deepseek_v2_model

Architecture deepseek_v2() {
  return {
      .type = "deepseek_v2", .spec = deepseek_v2_model::spec, .names = deepseek_v2_model::kNames};
}

}  // namespace freshet::models

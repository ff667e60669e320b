#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace deepseek_v3_model {

constexpr NameRule kNames[] = {
    {Role::kSharedGate, "model.layers.{}.mlp.shared_experts.gate_proj"},
    {Role::kSharedUp, "model.layers.{}.mlp.shared_experts.up_proj"},
    {Role::kSharedDown, "model.layers.{}.mlp.shared_experts.down_proj"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "deepseek_v3",
                             {.vocab = 129280,
                              .hidden = 7168,
                              .layers = 61,
                              .heads = 128,
                              .kv_heads = 128,
                              .ff = 18432,
                              .context = 4096});
  set_latent_attention(c, s, 1536);

  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 2048);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = moe.expert_ff * c.count({"n_shared_experts"}, 1);
  moe.router_correction = true;
  moe.routing.score = ops::Routing::Score::kSigmoid;
  moe.routing.experts = c.size({"n_routed_experts", "num_experts", "num_local_experts"}, 256);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 8);
  moe.routing.groups = c.size({"n_group"}, 8);
  moe.routing.top_groups = c.size({"topk_group"}, 4);
  moe.routing.group_score_top = 2;
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, true);
  moe.routing.renormalize_eps = 1e-20f;
  moe.routing.scale = static_cast<float>(c.number({"routed_scaling_factor"}, 2.5));
  const int first = c.count({"first_k_dense_replace"}, 3);
  const int step = c.size({"moe_layer_freq"}, 1);
  set_experts(s, moe, [&](int layer) { return layer >= first && layer % step == 0; });
  return s;
}

}  // namespace deepseek_v3_model

Architecture deepseek_v3() {
  return {
      .type = "deepseek_v3", .spec = deepseek_v3_model::spec, .names = deepseek_v3_model::kNames};
}

}  // namespace freshet::models

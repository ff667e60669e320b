#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace glm4_moe_model {

constexpr NameRule kNames[] = {
    {Role::kSharedGate, "model.layers.{}.mlp.shared_experts.gate_proj"},
    {Role::kSharedUp, "model.layers.{}.mlp.shared_experts.up_proj"},
    {Role::kSharedDown, "model.layers.{}.mlp.shared_experts.down_proj"},
};
constexpr NameRule kGgufNames[] = {
    {Role::kMlpIn, "blk.{}.post_attention_norm"},
    {Role::kAttentionOut, ""},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "glm4_moe",
                             {.vocab = 151552,
                              .layers = 46,
                              .heads = 96,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .ff = 10944,
                              .context = 131072,
                              .eps = 1e-5,
                              .rope = {.partial = 0.5}});
  const bool bias = c.flag({"attention_bias"}, false);
  const bool qk_norm = c.flag({"use_qk_norm"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = bias;
    if (qk_norm) layer.attention().qk_norm = QkNorm::kHead;
  }
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 1408);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = moe.expert_ff * c.count({"n_shared_experts"}, 1);
  moe.router_correction = true;
  moe.routing.score = ops::Routing::Score::kSigmoid;
  moe.routing.experts = c.size({"n_routed_experts", "num_experts", "num_local_experts"}, 128);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 8);
  moe.routing.groups = c.size({"n_group"}, 1);
  moe.routing.top_groups = c.size({"topk_group"}, 1);
  moe.routing.group_score_top = 2;
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, true);
  moe.routing.renormalize_eps = 1e-20f;
  moe.routing.scale = static_cast<float>(c.number({"routed_scaling_factor"}, 1));
  const int first = c.count({"first_k_dense_replace"}, 1);
  set_experts(s, moe, [&](int layer) { return layer >= first; });
  return s;
}

}  // namespace glm4_moe_model

Architecture glm4_moe() {
  return {.type = "glm4_moe",
          .spec = glm4_moe_model::spec,
          .names = glm4_moe_model::kNames,
          .gguf_names = glm4_moe_model::kGgufNames};
}

}  // namespace freshet::models

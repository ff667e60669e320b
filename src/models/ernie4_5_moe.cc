#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace ernie4_5_moe_model {

constexpr NameRule kNames[] = {
    {Role::kRouterCorrection, "model.layers.{}.mlp.moe_statics.e_score_correction_bias"},
    {Role::kSharedGate, "model.layers.{}.mlp.shared_experts.gate_proj"},
    {Role::kSharedUp, "model.layers.{}.mlp.shared_experts.up_proj"},
    {Role::kSharedDown, "model.layers.{}.mlp.shared_experts.down_proj"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "ernie4_5_moe",
                             {.vocab = 103424,
                              .hidden = 2560,
                              .layers = 28,
                              .heads = 20,
                              .kv_heads = 4,
                              .ff = 12288,
                              .context = 131072,
                              .tied = true,
                              .eps = 1e-5,
                              .rope = {.theta = 5e5, .interleaved = true}});
  if (c.flag({"use_bias"}, false)) {
    c.fail(unsupported("'use_bias' of ernie4_5_moe is not supported: experts have no biases"));
  }
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 1536);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = moe.expert_ff * c.count({"moe_num_shared_experts", "n_shared_experts"}, 2);
  moe.router_correction = true;
  moe.routing.experts = c.size({"moe_num_experts", "num_experts"}, 64);
  moe.routing.top_k = c.size({"moe_k", "num_experts_per_tok"}, 6);
  moe.routing.renormalize = true;
  const int first = c.count({"moe_layer_start_index", "first_k_dense_replace"}, 1);
  const int step = c.size({"moe_layer_interval", "interleave_moe_layer_step"}, 1);
  const double end = c.number({"moe_layer_end_index"}, -1);
  set_experts(s, moe, [&](int layer) {
    return layer >= first && (end < 0 || layer <= end) && (layer + 1) % step == 0;
  });
  return s;
}

}  // namespace ernie4_5_moe_model

Architecture ernie4_5_moe() {
  return {.type = "ernie4_5_moe",
          .spec = ernie4_5_moe_model::spec,
          .names = ernie4_5_moe_model::kNames};
}

}  // namespace freshet::models

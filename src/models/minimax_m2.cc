#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace minimax_m2_model {

constexpr NameRule kNames[] = {
    {Role::kRouter, "model.layers.{}.block_sparse_moe.gate"},
    {Role::kRouterCorrection, "model.layers.{}.block_sparse_moe.e_score_correction_bias"},
    {Role::kExpertGate, "model.layers.{}.block_sparse_moe.experts.{e}.w1"},
    {Role::kExpertUp, "model.layers.{}.block_sparse_moe.experts.{e}.w3"},
    {Role::kExpertDown, "model.layers.{}.block_sparse_moe.experts.{e}.w2"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "minimax_m2",
                             {.vocab = 200064,
                              .hidden = 3072,
                              .layers = 62,
                              .heads = 48,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .ff = 1536,
                              .context = 196608,
                              .rope = {.theta = 5e6}});
  // `rotary_dim` is the spelling of files without `rope_parameters`.
  if (const json::Value* p = c.find({"rope_parameters"})) {
    const int head_dim = s.layers.front().attention().head_dim;
    s.ropes.front().rotary_dim =
        static_cast<int>(head_dim * p->get_double("partial_rotary_factor", 1.0));
  }
  if (c.text({"qk_norm_type"}, "per_layer") != "per_layer") {
    c.fail(unsupported("the configuration's 'qk_norm_type' must be per_layer"));
  }
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, s.layers.front().mlp().ff);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.router_correction = true;
  moe.routing.score = ops::Routing::Score::kSigmoid;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 256);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 8);
  moe.routing.renormalize = true;
  set_experts(s, moe, [](int) { return true; });
  for (LayerSpec& layer : s.layers) {
    if (c.flag({"use_qk_norm"}, true)) layer.attention().qk_norm = QkNorm::kFull;
  }
  return s;
}

}  // namespace minimax_m2_model

Architecture minimax_m2() {
  return {.type = "minimax_m2", .spec = minimax_m2_model::spec, .names = minimax_m2_model::kNames};
}

}  // namespace freshet::models

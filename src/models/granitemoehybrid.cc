#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace granite_hybrid_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "granitemoehybrid",
                             {.rotary = c.text({"position_embedding_type"}, "nope") == "rope"});
  s.embedding_scale = static_cast<float>(c.number({"embedding_multiplier"}, 1));
  s.residual_scale = static_cast<float>(c.number({"residual_multiplier"}, 1));
  const double divisor = c.number({"logits_scaling", "logit_scale"}, 1);
  if (divisor == 0) c.fail(invalid_argument("the configuration's 'logits_scaling' must not be 0"));
  s.logits_scale = static_cast<float>(1 / divisor);
  const bool bias = c.flag({"attention_bias"}, false);
  const int shared = c.size({"shared_intermediate_size"}, 1024);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.scale = static_cast<float>(c.number({"attention_multiplier"}, 1));
    a.qkv_bias = a.out_bias = bias;
  }
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = shared;
  moe.routing.score = ops::Routing::Score::kTopkSoftmax;
  moe.routing.experts = c.count({"num_local_experts", "num_experts"}, 8);
  moe.routing.top_k = c.count({"num_experts_per_tok"}, 2);
  if (moe.routing.experts > 0) {
    set_experts(s, moe, [](int) { return true; });
  } else {
    for (LayerSpec& layer : s.layers) layer.mlp().ff = shared;
  }
  const std::vector<bool> attends =
      attention_layers(c, s, {"full_attention", "attention"}, {"linear_attention", "mamba"});
  set_state_layers(s, read_mamba2(c, s.hidden_size, s.final_norm->eps),
                   [&](int layer) { return attends[static_cast<size_t>(layer)]; });
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kRouter, "model.layers.{}.block_sparse_moe.router.layer"},
    {Role::kExpertsGateUp, "model.layers.{}.block_sparse_moe.input_linear"},
    {Role::kExpertsDown, "model.layers.{}.block_sparse_moe.output_linear"},
    {Role::kSharedGateUp, "model.layers.{}.shared_mlp.input_linear"},
    {Role::kSharedDown, "model.layers.{}.shared_mlp.output_linear"},
    {Role::kGateUp, "model.layers.{}.shared_mlp.input_linear"},
    {Role::kDown, "model.layers.{}.shared_mlp.output_linear"},
};

// Gates and ups are matrices of their own.
constexpr NameRule kGgufNames[] = {{Role::kGateUp, ""}};

}  // namespace granite_hybrid_model

Architecture granitemoehybrid() {
  return {.type = "granitemoehybrid",
          .spec = granite_hybrid_model::spec,
          .names = granite_hybrid_model::kNames,
          .gguf_names = granite_hybrid_model::kGgufNames,
          .gguf_interleaves = true};
}

}  // namespace freshet::models

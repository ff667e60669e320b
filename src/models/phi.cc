#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace phi_model {

constexpr NameRule kNames[] = {
    {Role::kFinalNorm, "model.final_layernorm"},
    {Role::kOutput, "model.layers.{}.self_attn.dense"},
    {Role::kQueryNorm, "model.layers.{}.self_attn.q_layernorm"},
    {Role::kKeyNorm, "model.layers.{}.self_attn.k_layernorm"},
    {Role::kUp, "model.layers.{}.mlp.fc1"},
    {Role::kDown, "model.layers.{}.mlp.fc2"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "phi",
                             {.vocab = 51200,
                              .hidden = 2048,
                              .layers = 24,
                              .ff = 8192,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu_new",
                              .rope = {.partial = 0.5}});
  s.logits_bias = true;
  const bool qk_norm = c.flag({"qk_layernorm"}, false);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.qkv_bias = a.out_bias = layer.mlp().bias = true;
    if (qk_norm) a.qk_norm = QkNorm::kHead;
    layer.parallel = true;
    layer.branches.back().norms.in.reset();
  }
  return s;
}

}  // namespace phi_model

Architecture phi() {
  return {.type = "phi", .spec = phi_model::spec, .names = phi_model::kNames};
}

}  // namespace freshet::models

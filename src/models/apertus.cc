#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace apertus_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionIn, "model.layers.{}.attention_layernorm"},
    {Role::kMlpIn, "model.layers.{}.feedforward_layernorm"},
    {Role::kXieluPositive, "model.layers.{}.mlp.act_fn.alpha_p"},
    {Role::kXieluNegative, "model.layers.{}.mlp.act_fn.alpha_n"},
    {Role::kXieluBeta, "model.layers.{}.mlp.act_fn.beta"},
    {Role::kXieluEps, "model.layers.{}.mlp.act_fn.eps"},
};

// The published scaling, for configurations that leave it out.
void default_rope(RopeSpec& rope) {
  rope.scaling = RopeSpec::Scaling::kLlama3;
  rope.factor = 8;
  rope.original_context = 8192;
  rope.low_freq_factor = 1;
  rope.high_freq_factor = 4;
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "apertus",
                             {.vocab = 131072,
                              .ff = 14336,
                              .context = 65536,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "xielu",
                              .rope = {.theta = 1.2e7}});
  if (!c.has("rope_parameters") && !c.has("rope_scaling")) default_rope(s.ropes.front());
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().qk_norm = QkNorm::kHead;
  }
  return s;
}

}  // namespace apertus_model

Architecture apertus() {
  return {.type = "apertus", .spec = apertus_model::spec, .names = apertus_model::kNames};
}

}  // namespace freshet::models

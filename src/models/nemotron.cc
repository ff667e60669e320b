#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace nemotron_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "nemotron",
                             {.vocab = 256000,
                              .hidden = 6144,
                              .heads = 48,
                              .ff = 24576,
                              .context = 4096,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "relu2",
                              .rope = {.partial = 0.5}});
  const bool bias = c.flag({"attention_bias"}, false);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.mlp().bias = mlp_bias;
  }
  return s;
}

}  // namespace nemotron_model

Architecture nemotron() {
  return {.type = "nemotron", .spec = nemotron_model::spec, .norms_less_one = true};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace arcee_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "arcee",
                             {.hidden = 2560,
                              .ff = 18432,
                              .context = 4096,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "relu2"});
  const bool bias = c.flag({"attention_bias"}, false);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.mlp().bias = mlp_bias;
  }
  return s;
}

}  // namespace arcee_model

Architecture arcee() {
  return {.type = "arcee", .spec = arcee_model::spec, .gguf_interleaves = true};
}

}  // namespace freshet::models

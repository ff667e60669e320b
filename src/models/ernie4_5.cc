#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace ernie4_5_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "ernie4_5",
                             {.vocab = 103424,
                              .hidden = 1024,
                              .layers = 18,
                              .heads = 16,
                              .kv_heads = 2,
                              .head_dim = 128,
                              .ff = 3072,
                              .context = 131072,
                              .tied = true,
                              .eps = 1e-5,
                              .rope = {.theta = 5e5, .interleaved = true}});
  const bool bias = c.flag({"use_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = layer.mlp().bias = bias;
  }
  return s;
}

}  // namespace ernie4_5_model

Architecture ernie4_5() {
  return {.type = "ernie4_5", .spec = ernie4_5_model::spec};
}

}  // namespace freshet::models

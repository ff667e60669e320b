#include <cmath>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gemma_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gemma",
                             {.vocab = 256000,
                              .hidden = 3072,
                              .layers = 28,
                              .heads = 16,
                              .kv_heads = 16,
                              .head_dim = 256,
                              .ff = 24576,
                              .context = 8192,
                              .tied = true,
                              .activation = "gelu_pytorch_tanh"});
  s.embedding_scale = std::sqrt(static_cast<float>(s.hidden_size));
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    // The first configurations say "gelu", but the model was trained with the approximation.
    if (layer.mlp().activation == ops::Activation::kGelu)
      layer.mlp().activation = ops::Activation::kGeluTanh;
  }
  return s;
}

}  // namespace gemma_model

Architecture gemma() {
  return {.type = "gemma", .spec = gemma_model::spec, .norms_less_one = true};
}

}  // namespace freshet::models

// Llama and models with its configuration: a decoder with RMS norms, grouped-query attention, RoPE
// and a SwiGLU MLP; attention and MLP may have biases. Other architectures name only how their
// weights differ from Llama's.
#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace llama_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "llama", {});
  const bool attention_bias = c.flag({"attention_bias"}, false);
  const bool out_bias = c.flag({"attention_out_bias"}, attention_bias);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = attention_bias;
    layer.attention().out_bias = out_bias;
    layer.mlp().bias = mlp_bias;
  }
  return s;
}

}  // namespace llama_model

Architecture llama() {
  return {.type = "llama", .spec = llama_model::spec, .gguf_interleaves = true};
}

}  // namespace freshet::models

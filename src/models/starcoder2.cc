#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace starcoder2_model {

constexpr NameRule kNames[] = {
    {Role::kUp, "model.layers.{}.mlp.c_fc"},
    {Role::kDown, "model.layers.{}.mlp.c_proj"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "starcoder2",
                             {.vocab = 49152,
                              .hidden = 3072,
                              .layers = 30,
                              .heads = 24,
                              .kv_heads = 2,
                              .ff = 12288,
                              .context = 4096,
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu_pytorch_tanh"});
  const int window = c.count({"sliding_window"}, 0);
  const bool bias = c.flag({"use_bias"}, true);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = layer.mlp().bias = bias;
    layer.attention().window = window >= s.max_context ? 0 : window;
  }
  return s;
}

}  // namespace starcoder2_model

Architecture starcoder2() {
  return {.type = "starcoder2", .spec = starcoder2_model::spec, .names = starcoder2_model::kNames};
}

}  // namespace freshet::models

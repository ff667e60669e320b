#include <algorithm>

#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace bamba_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "bamba", {.vocab = 128000, .kv_heads = 8, .ff = 14336, .context = 262144, .eps = 1e-5});
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.mlp().bias = c.flag({"mlp_bias"}, false);
  }
  const std::vector<float> attends = c.floats({"attn_layer_indices"});
  set_state_layers(s, read_mamba2(c, s.hidden_size, s.final_norm->eps), [&](int layer) {
    return std::ranges::find(attends, static_cast<float>(layer)) != attends.end();
  });
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kFinalNorm, "model.final_layernorm"},
    {Role::kMlpIn, "model.layers.{}.pre_ff_layernorm"},
    {Role::kGate, "model.layers.{}.feed_forward.gate_proj"},
    {Role::kUp, "model.layers.{}.feed_forward.up_proj"},
    {Role::kDown, "model.layers.{}.feed_forward.down_proj"},
};

}  // namespace bamba_model

Architecture bamba() {
  return {.type = "bamba",
          .spec = bamba_model::spec,
          .names = bamba_model::kNames,
          .gguf_interleaves = true};
}

}  // namespace freshet::models

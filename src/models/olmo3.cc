#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace olmo3_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionOut, "model.layers.{}.post_attention_layernorm"},
    {Role::kMlpOut, "model.layers.{}.post_feedforward_layernorm"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "olmo3", {.vocab = 50304, .eps = 1e-5, .rotary = false});
  const auto slides = local_layers(c, [](int layer) { return (layer + 1) % 4 != 0; });
  set_windows(c, s, c.has_null("sliding_window") ? 0 : c.count({"sliding_window"}, 4096), slides);
  set_local_ropes(c, s, 5e5, slides);
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().qk_norm = QkNorm::kFull;
    for (BranchSpec& branch : layer.branches) branch.norms = {.out = branch.norms.in};
  }
  return s;
}

}  // namespace olmo3_model

Architecture olmo3() {
  return {.type = "olmo3", .spec = olmo3_model::spec, .names = olmo3_model::kNames};
}

}  // namespace freshet::models

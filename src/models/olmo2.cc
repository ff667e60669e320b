#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace olmo2_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionOut, "model.layers.{}.post_attention_layernorm"},
    {Role::kMlpOut, "model.layers.{}.post_feedforward_layernorm"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "olmo2", {.vocab = 50304, .eps = 1e-5});
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().qk_norm = QkNorm::kFull;
    for (BranchSpec& branch : layer.branches) branch.norms = {.out = branch.norms.in};
  }
  return s;
}

}  // namespace olmo2_model

Architecture olmo2() {
  return {.type = "olmo2", .spec = olmo2_model::spec, .names = olmo2_model::kNames};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace glm4_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionOut, "model.layers.{}.post_self_attn_layernorm"},
    {Role::kMlpOut, "model.layers.{}.post_mlp_layernorm"},
};
constexpr NameRule kGgufNames[] = {{Role::kUp, ""}};  // ffn_up holds gate and up

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "glm4",
                             {.vocab = 151552,
                              .layers = 40,
                              .kv_heads = 2,
                              .head_dim = 128,
                              .ff = 13696,
                              .context = 131072,
                              .eps = 1.5625e-07,
                              .rope = {.partial = 0.5, .interleaved = true}});
  const bool bias = c.flag({"attention_bias"}, true);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = bias;
    for (BranchSpec& branch : layer.branches) branch.norms.out = branch.norms.in;
  }
  return s;
}

}  // namespace glm4_model

Architecture glm4() {
  return {.type = "glm4",
          .spec = glm4_model::spec,
          .names = glm4_model::kNames,
          .gguf_names = glm4_model::kGgufNames};
}

}  // namespace freshet::models

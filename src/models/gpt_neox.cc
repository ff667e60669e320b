#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gpt_neox_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "gpt_neox.embed_in"},
    {Role::kFinalNorm, "gpt_neox.final_layer_norm"},
    {Role::kHead, "embed_out"},
    {Role::kAttentionIn, "gpt_neox.layers.{}.input_layernorm"},
    {Role::kMlpIn, "gpt_neox.layers.{}.post_attention_layernorm"},
    {Role::kQkv, "gpt_neox.layers.{}.attention.query_key_value"},
    {Role::kOutput, "gpt_neox.layers.{}.attention.dense"},
    {Role::kUp, "gpt_neox.layers.{}.mlp.dense_h_to_4h"},
    {Role::kDown, "gpt_neox.layers.{}.mlp.dense_4h_to_h"},
};

ModelSpec spec(Config& c) {
  const double base = c.number({"rotary_emb_base"}, 10000);
  const double share = c.number({"rotary_pct"}, 0.25);
  ModelSpec s = decoder_spec(c, "gpt_neox",
                             {.vocab = 50432,
                              .hidden = 6144,
                              .layers = 44,
                              .heads = 64,
                              .ff = 24576,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu",
                              .rope = {.theta = base, .partial = share}});
  const bool bias = c.flag({"attention_bias"}, true);
  const bool parallel = c.flag({"use_parallel_residual"}, true);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.mlp().bias = true;
    layer.parallel = parallel;
  }
  return s;
}

}  // namespace gpt_neox_model

Architecture gpt_neox() {
  return {.type = "gpt_neox",
          .spec = gpt_neox_model::spec,
          .names = gpt_neox_model::kNames,
          .fused_qkv = FusedQkv::kPerGroup};
}

}  // namespace freshet::models

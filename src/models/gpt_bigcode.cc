#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gpt_bigcode_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "transformer.wte"},           {Role::kPositions, "transformer.wpe"},
    {Role::kFinalNorm, "transformer.ln_f"},          {Role::kAttentionIn, "transformer.h.{}.ln_1"},
    {Role::kMlpIn, "transformer.h.{}.ln_2"},         {Role::kQkv, "transformer.h.{}.attn.c_attn"},
    {Role::kOutput, "transformer.h.{}.attn.c_proj"}, {Role::kUp, "transformer.h.{}.mlp.c_fc"},
    {Role::kDown, "transformer.h.{}.mlp.c_proj"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gpt_bigcode",
                             {.vocab = 50257,
                              .hidden = 768,
                              .layers = 12,
                              .heads = 12,
                              .ff = 4 * c.size({"n_embd", "hidden_size"}, 768),
                              .context = 1024,
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu_pytorch_tanh",
                              .rotary = false});
  s.learned_positions = s.max_context;
  const bool one_head = c.flag({"multi_query"}, true);
  const bool scaled = c.flag({"scale_attn_weights"}, true);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.kv_heads = one_head ? 1 : a.heads;
    a.qkv_bias = a.out_bias = layer.mlp().bias = true;
    if (!scaled) a.scale = 1.0f;
  }
  return s;
}

}  // namespace gpt_bigcode_model

Architecture gpt_bigcode() {
  return {.type = "gpt_bigcode",
          .spec = gpt_bigcode_model::spec,
          .names = gpt_bigcode_model::kNames,
          .fused_qkv = FusedQkv::kPerGroup};
}

}  // namespace freshet::models

// GPT-2, and GPT-BigCode (StarCoder, arXiv:2305.06161), which shares keys and values.
#include <string_view>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gpt2_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "transformer.wte"},           {Role::kPositions, "transformer.wpe"},
    {Role::kFinalNorm, "transformer.ln_f"},          {Role::kAttentionIn, "transformer.h.{}.ln_1"},
    {Role::kMlpIn, "transformer.h.{}.ln_2"},         {Role::kQkv, "transformer.h.{}.attn.c_attn"},
    {Role::kOutput, "transformer.h.{}.attn.c_proj"}, {Role::kUp, "transformer.h.{}.mlp.c_fc"},
    {Role::kDown, "transformer.h.{}.mlp.c_proj"},
};

ModelSpec read(Config& c, std::string_view name, std::string_view activation) {
  ModelSpec s = decoder_spec(c, name,
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
                              .activation = activation,
                              .rotary = false});
  s.learned_positions = s.max_context;
  const bool scaled = c.flag({"scale_attn_weights"}, true);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.qkv_bias = a.out_bias = layer.mlp().bias = true;
    if (!scaled) a.scale = 1.0f;
  }
  return s;
}

ModelSpec spec(Config& c) {
  ModelSpec s = read(c, "gpt2", "gelu_new");
  if (c.flag({"scale_attn_by_inverse_layer_idx"}, false)) {
    for (size_t i = 0; i < s.layers.size(); ++i)
      s.layers[i].attention().scale /= static_cast<float>(i + 1);
  }
  return s;
}

ModelSpec bigcode_spec(Config& c) {
  ModelSpec s = read(c, "gpt_bigcode", "gelu_pytorch_tanh");
  if (c.flag({"multi_query"}, true)) {
    for (LayerSpec& layer : s.layers) layer.attention().kv_heads = 1;
  }
  return s;
}

}  // namespace gpt2_model

Architecture gpt2() {
  return {
      .type = "gpt2", .spec = gpt2_model::spec, .names = gpt2_model::kNames, .transposed = true};
}

Architecture gpt_bigcode() {
  return {.type = "gpt_bigcode",
          .spec = gpt2_model::bigcode_spec,
          .names = gpt2_model::kNames,
          .fused_qkv = FusedQkv::kPerGroup};
}

}  // namespace freshet::models

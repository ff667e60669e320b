#include <cmath>

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

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gpt2",
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
                              .activation = "gelu_new",
                              .rotary = false});
  s.learned_positions = s.max_context;
  const bool scaled = c.flag({"scale_attn_weights"}, true);
  const bool by_layer = c.flag({"scale_attn_by_inverse_layer_idx"}, false);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    AttentionSpec& a = s.layers[i].attention();
    a.qkv_bias = a.out_bias = s.layers[i].mlp().bias = true;
    if (!scaled) a.scale = 1.0f;
    if (by_layer) a.scale /= static_cast<float>(i + 1);
  }
  return s;
}

}  // namespace gpt2_model

Architecture gpt2() {
  return {
      .type = "gpt2", .spec = gpt2_model::spec, .names = gpt2_model::kNames, .transposed = true};
}

}  // namespace freshet::models

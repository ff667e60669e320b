#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gptj_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "transformer.wte"},
    {Role::kFinalNorm, "transformer.ln_f"},
    {Role::kAttentionIn, "transformer.h.{}.ln_1"},
    {Role::kQuery, "transformer.h.{}.attn.q_proj"},
    {Role::kKey, "transformer.h.{}.attn.k_proj"},
    {Role::kValue, "transformer.h.{}.attn.v_proj"},
    {Role::kOutput, "transformer.h.{}.attn.out_proj"},
    {Role::kUp, "transformer.h.{}.mlp.fc_in"},
    {Role::kDown, "transformer.h.{}.mlp.fc_out"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gptj",
                             {.vocab = 50400,
                              .layers = 28,
                              .heads = 16,
                              .ff = 4 * c.size({"n_embd", "hidden_size"}, 4096),
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu_new",
                              .rotary = false});
  RopeSpec rope;
  rope.rotary_dim = c.size({"rotary_dim"}, 64);
  rope.interleaved = true;
  s.ropes = {rope};
  s.logits_bias = true;
  for (LayerSpec& layer : s.layers) {
    layer.attention().rope = 0;
    layer.mlp().bias = true;
    layer.parallel = true;
    layer.branches.back().norms.in.reset();
  }
  return s;
}

}  // namespace gptj_model

Architecture gptj() {
  return {.type = "gptj", .spec = gptj_model::spec, .names = gptj_model::kNames};
}

}  // namespace freshet::models

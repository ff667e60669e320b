#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace opt_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "model.decoder.embed_tokens"},
    {Role::kPositions, "model.decoder.embed_positions"},
    {Role::kEmbeddingIn, "model.decoder.project_in"},
    {Role::kEmbeddingOut, "model.decoder.project_out"},
    {Role::kFinalNorm, "model.decoder.final_layer_norm"},
    {Role::kAttentionIn, "model.decoder.layers.{}.self_attn_layer_norm"},
    {Role::kAttentionAfter, "model.decoder.layers.{}.self_attn_layer_norm"},
    {Role::kMlpIn, "model.decoder.layers.{}.final_layer_norm"},
    {Role::kMlpAfter, "model.decoder.layers.{}.final_layer_norm"},
    {Role::kQuery, "model.decoder.layers.{}.self_attn.q_proj"},
    {Role::kKey, "model.decoder.layers.{}.self_attn.k_proj"},
    {Role::kValue, "model.decoder.layers.{}.self_attn.v_proj"},
    {Role::kOutput, "model.decoder.layers.{}.self_attn.out_proj"},
    {Role::kUp, "model.decoder.layers.{}.fc1"},
    {Role::kDown, "model.decoder.layers.{}.fc2"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "opt",
                             {.vocab = 50272,
                              .hidden = 768,
                              .layers = 12,
                              .heads = 12,
                              .ff = 3072,
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "relu",
                              .rotary = false});
  s.embedding_size = c.size({"word_embed_proj_dim"}, s.hidden_size);
  s.position_offset = 2;
  s.learned_positions = s.max_context + s.position_offset;
  NormSpec norm = *s.final_norm;
  norm.weight = norm.bias = c.flag({"layer_norm_elementwise_affine"}, true);
  const bool before = c.flag({"do_layer_norm_before"}, true);
  s.final_norm.reset();
  if (before && !c.flag({"_remove_final_layer_norm"}, false)) s.final_norm = norm;
  const bool bias = c.flag({"enable_bias"}, true);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = layer.mlp().bias = bias;
    for (BranchSpec& branch : layer.branches) {
      branch.norms = {};
      (before ? branch.norms.in : branch.norms.after) = norm;
    }
  }
  return s;
}

}  // namespace opt_model

Architecture opt() {
  return {.type = "opt", .spec = opt_model::spec, .names = opt_model::kNames};
}

}  // namespace freshet::models

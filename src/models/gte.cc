// GTE (arXiv:2407.19669): BERT with rotary positions and gated MLPs. Its first repositories call
// the model "new".
#include "models/architectures.h"
#include "models/encoder_config.h"

namespace freshet::models {
namespace gte_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "embeddings.word_embeddings"},
    {Role::kTokenTypes, "embeddings.token_type_embeddings"},
    {Role::kEmbeddedNorm, "embeddings.LayerNorm"},
    {Role::kQuery, ""},
    {Role::kQkv, "encoder.layer.{}.attention.qkv_proj"},
    {Role::kOutput, "encoder.layer.{}.attention.o_proj"},
    {Role::kAttentionAfter, "encoder.layer.{}.attn_ln"},
    {Role::kGate, ""},
    {Role::kGateUp, "encoder.layer.{}.mlp.up_gate_proj"},
    {Role::kDown, "encoder.layer.{}.mlp.down_proj"},
    {Role::kMlpAfter, "encoder.layer.{}.mlp_ln"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = encoder_spec(c, "gte",
                             {.vocab = 250048,
                              .hidden = 768,
                              .layers = 12,
                              .heads = 12,
                              .ff = 3072,
                              .context = 8192,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-12,
                              .activation = "gelu",
                              .rope = {.theta = 160000.0}});
  if (c.text({"layer_norm_type"}, "layer_norm") != "layer_norm")
    c.fail(unsupported("layer_norm_type of gte: only layer_norm is supported"));
  s.token_types = c.count({"type_vocab_size"}, 1);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = true;
    layer.mlp().down_bias = true;
  }
  return s;
}

Architecture named(std::string_view type) {
  return {.type = type, .spec = spec, .names = kNames, .up_before_gate = true};
}

}  // namespace gte_model

Architecture gte() {
  return gte_model::named("gte");
}

Architecture gte_new() {
  return gte_model::named("new");
}

}  // namespace freshet::models

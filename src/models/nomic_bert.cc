// NomicBERT (arXiv:2402.01613): BERT with rotary positions and gated MLPs, without biases.
#include "models/architectures.h"
#include "models/encoder_config.h"

namespace freshet::models {
namespace nomic_bert_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "embeddings.word_embeddings"},
    {Role::kTokenTypes, "embeddings.token_type_embeddings"},
    {Role::kEmbeddedNorm, "emb_ln"},
    {Role::kQuery, ""},
    {Role::kQkv, "encoder.layers.{}.attn.Wqkv"},
    {Role::kOutput, "encoder.layers.{}.attn.out_proj"},
    {Role::kAttentionAfter, "encoder.layers.{}.norm1"},
    {Role::kGate, "encoder.layers.{}.mlp.fc12"},
    {Role::kUp, "encoder.layers.{}.mlp.fc11"},
    {Role::kDown, "encoder.layers.{}.mlp.fc2"},
    {Role::kMlpAfter, "encoder.layers.{}.norm2"},
};

constexpr NameRule kGgufNames[] = {
    {Role::kAttentionAfter, "blk.{}.attn_output_norm"},
    {Role::kMlpAfter, "blk.{}.layer_output_norm"},
    {Role::kQuery, ""},
};

// The published repositories have keys of GPT-2 and of their own code, newer ones those of BERT.
ModelSpec spec(Config& c) {
  RopeDefaults rope;
  rope.theta = c.number({"rotary_emb_base"}, 10000.0);
  rope.partial = c.number({"rotary_emb_fraction"}, 1.0);
  rope.interleaved = c.flag({"rotary_emb_interleaved"}, false);
  ModelSpec s = encoder_spec(c, "nomic_bert",
                             {.vocab = 30528,
                              .hidden = 768,
                              .layers = 12,
                              .heads = 12,
                              .ff = 3072,
                              .context = 2048,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-12,
                              .activation = "silu",
                              .rope = rope});
  if (c.flag({"prenorm"}, false)) c.fail(unsupported("a nomic_bert with prenorm"));
  if (c.number({"num_experts"}, 0) > 0) c.fail(unsupported("a nomic_bert with experts"));
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = c.flag({"qkv_proj_bias", "qkv_bias"}, false);
    layer.attention().out_bias = layer.attention().qkv_bias;
    layer.mlp().bias = c.flag({"mlp_fc1_bias"}, false);
  }
  return s;
}

}  // namespace nomic_bert_model

Architecture nomic_bert() {
  return {.type = "nomic_bert",
          .spec = nomic_bert_model::spec,
          .names = nomic_bert_model::kNames,
          .gguf_names = nomic_bert_model::kGgufNames};
}

}  // namespace freshet::models

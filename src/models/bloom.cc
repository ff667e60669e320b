// BLOOM (arXiv:2211.05100) and MPT: no positions, but ALiBi.
#include <cmath>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace bloom_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "transformer.word_embeddings"},
    {Role::kEmbeddedNorm, "transformer.word_embeddings_layernorm"},
    {Role::kFinalNorm, "transformer.ln_f"},
    {Role::kAttentionIn, "transformer.h.{}.input_layernorm"},
    {Role::kMlpIn, "transformer.h.{}.post_attention_layernorm"},
    {Role::kQkv, "transformer.h.{}.self_attention.query_key_value"},
    {Role::kOutput, "transformer.h.{}.self_attention.dense"},
    {Role::kUp, "transformer.h.{}.mlp.dense_h_to_4h"},
    {Role::kDown, "transformer.h.{}.mlp.dense_4h_to_h"},
};

ModelSpec spec(Config& c) {
  const int hidden = c.size({"n_embed", "hidden_size"}, 64);
  ModelSpec s = decoder_spec(c, "bloom",
                             {.vocab = 250880,
                              .hidden = hidden,
                              .layers = 2,
                              .heads = 8,
                              .ff = 4 * hidden,
                              .context = c.length({"seq_length"}, 2048),
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu_new",
                              .rotary = false});
  if (c.flag({"apply_residual_connection_post_layernorm"}, false))
    c.fail(unsupported("'apply_residual_connection_post_layernorm' of bloom is not supported"));
  s.embedded_norm = s.final_norm;
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.qkv_bias = a.out_bias = layer.mlp().bias = true;
    a.slopes = alibi_slopes(a.heads);
  }
  return s;
}

}  // namespace bloom_model

namespace mpt_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "transformer.wte"},
    {Role::kFinalNorm, "transformer.norm_f"},
    {Role::kAttentionIn, "transformer.blocks.{}.norm_1"},
    {Role::kMlpIn, "transformer.blocks.{}.norm_2"},
    {Role::kQkv, "transformer.blocks.{}.attn.Wqkv"},
    {Role::kOutput, "transformer.blocks.{}.attn.out_proj"},
    {Role::kUp, "transformer.blocks.{}.ffn.up_proj"},
    {Role::kDown, "transformer.blocks.{}.ffn.down_proj"},
};

ModelSpec spec(Config& c) {
  const int hidden = c.size({"d_model"}, 2048);
  ModelSpec s = decoder_spec(c, "mpt",
                             {.vocab = 50368,
                              .hidden = hidden,
                              .layers = c.size({"n_layers"}, 24),
                              .heads = c.size({"n_heads"}, 16),
                              .ff = c.size({"expansion_ratio"}, 4) * hidden,
                              .context = c.length({"max_seq_len"}, 2048),
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "gelu",
                              .rotary = false});
  static const json::Value kEmpty{json::Object{}};
  const json::Value* const given = c.find({"attn_config"});
  Config a(given != nullptr && given->is_object() ? *given : kEmpty, "attn_config.");
  const bool learned = !a.flag({"alibi"}, true) && c.flag({"learned_pos_emb"}, true);
  const bool clips = a.number({"clip_qkv"}, 0.0) > 0.0;
  if (learned || clips || a.flag({"qk_ln"}, false) || a.flag({"prefix_lm"}, false) ||
      !c.flag({"no_bias"}, true) ||
      a.text({"attn_type"}, "multihead_attention") != "multihead_attention") {
    c.fail(unsupported(
        "of mpt only models with ALiBi are supported, without biases, clip_qkv, qk_ln, prefix_lm "
        "and multi-query attention"));
  }
  const double max_bias = a.number({"alibi_bias_max"}, 8.0);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& attention = layer.attention();
    attention.scale =
        static_cast<float>(a.number({"softmax_scale"}, 1.0 / std::sqrt(attention.head_dim)));
    attention.slopes = alibi_slopes(attention.heads, max_bias);
  }
  if (!a.status().ok()) c.fail(a.status());
  return s;
}

}  // namespace mpt_model

Architecture bloom() {
  return {.type = "bloom",
          .spec = bloom_model::spec,
          .names = bloom_model::kNames,
          .fused_qkv = FusedQkv::kPerGroup};
}

Architecture mpt() {
  return {.type = "mpt", .spec = mpt_model::spec, .names = mpt_model::kNames};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"
#include "tensor/dtype.h"

namespace freshet::models {
namespace falcon_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "transformer.word_embeddings"},
    {Role::kFinalNorm, "transformer.ln_f"},
    {Role::kAttentionIn, "transformer.h.{}.ln_attn|transformer.h.{}.input_layernorm"},
    {Role::kMlpIn, "transformer.h.{}.ln_mlp|transformer.h.{}.post_attention_layernorm"},
    {Role::kQkv, "transformer.h.{}.self_attention.query_key_value"},
    {Role::kOutput, "transformer.h.{}.self_attention.dense"},
    {Role::kUp, "transformer.h.{}.mlp.dense_h_to_4h"},
    {Role::kDown, "transformer.h.{}.mlp.dense_4h_to_h"},
};
// Where attention and the MLP have norms of their own, attn_norm is the MLP's.
constexpr NameRule kGgufNames[] = {
    {Role::kAttentionIn, "blk.{}.attn_norm_2|blk.{}.attn_norm"},
    {Role::kMlpIn, "blk.{}.attn_norm"},
};

ModelSpec spec(Config& c) {
  const int hidden = c.size({"hidden_size", "n_embed"}, 4544);
  const bool alibi = c.flag({"alibi"}, false);
  ModelSpec s = decoder_spec(c, "falcon",
                             {.vocab = 65024,
                              .hidden = hidden,
                              .layers = 32,
                              .heads = 71,
                              .ff = c.size({"ffn_hidden_size"}, 4 * hidden),
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = c.text({"activation"}, "gelu"),
                              .rotary = !alibi});
  const bool grouped = c.flag({"new_decoder_architecture"}, false);
  const bool one_head = !grouped && c.flag({"multi_query"}, true);
  const bool parallel = grouped || c.flag({"parallel_attn"}, true);
  const bool two_norms = grouped && c.count({"num_ln_in_parallel_attn"}, 2) == 2;
  const bool bias = c.flag({"bias"}, false);
  const int heads = s.layers.front().attention().heads;
  const int kv_heads =
      one_head ? 1 : c.size({"num_kv_heads", "n_head_kv", "num_key_value_heads"}, heads);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.kv_heads = kv_heads;
    if (alibi) {
      // The slopes are BF16 numbers, and are scaled as the scores are.
      a.slopes = alibi_slopes(heads);
      for (float& slope : a.slopes) slope = bf16_to_f32(f32_to_bf16(slope)) * a.scale;
    }
    a.qkv_bias = a.out_bias = layer.mlp().bias = bias;
    layer.parallel = parallel;
    if (parallel && !two_norms) layer.branches.back().norms.in.reset();
  }
  return s;
}

}  // namespace falcon_model

Architecture falcon() {
  return {.type = "falcon",
          .spec = falcon_model::spec,
          .names = falcon_model::kNames,
          .gguf_names = falcon_model::kGgufNames,
          .fused_qkv = FusedQkv::kPerGroup};
}

}  // namespace freshet::models

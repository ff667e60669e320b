// T5 (arXiv:1910.10683), its version 1.1, Flan-T5, mT5 and UMT5.
#include <cmath>

#include "models/architectures.h"
#include "models/seq2seq_config.h"

namespace freshet::models {
namespace t5_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "shared"},
    {Role::kFinalNorm, "decoder.final_layer_norm"},
    {Role::kAttentionIn, "decoder.block.{}.layer.0.layer_norm"},
    {Role::kQuery, "decoder.block.{}.layer.0.SelfAttention.q"},
    {Role::kKey, "decoder.block.{}.layer.0.SelfAttention.k"},
    {Role::kValue, "decoder.block.{}.layer.0.SelfAttention.v"},
    {Role::kOutput, "decoder.block.{}.layer.0.SelfAttention.o"},
    {Role::kDistanceBias, "decoder.block.{}.layer.0.SelfAttention.relative_attention_bias"},
    {Role::kCrossIn, "decoder.block.{}.layer.1.layer_norm"},
    {Role::kCrossQuery, "decoder.block.{}.layer.1.EncDecAttention.q"},
    {Role::kCrossKey, "decoder.block.{}.layer.1.EncDecAttention.k"},
    {Role::kCrossValue, "decoder.block.{}.layer.1.EncDecAttention.v"},
    {Role::kCrossOutput, "decoder.block.{}.layer.1.EncDecAttention.o"},
    {Role::kMlpIn, "decoder.block.{}.layer.2.layer_norm"},
    {Role::kGate, "decoder.block.{}.layer.2.DenseReluDense.wi_0"},
    {Role::kUp,
     "decoder.block.{}.layer.2.DenseReluDense.wi_1|decoder.block.{}.layer.2.DenseReluDense.wi"},
    {Role::kDown, "decoder.block.{}.layer.2.DenseReluDense.wo"},
};

constexpr NameRule kEncoderNames[] = {
    {Role::kEmbedding, "shared"},
    {Role::kFinalNorm, "encoder.final_layer_norm"},
    {Role::kAttentionIn, "encoder.block.{}.layer.0.layer_norm"},
    {Role::kQuery, "encoder.block.{}.layer.0.SelfAttention.q"},
    {Role::kKey, "encoder.block.{}.layer.0.SelfAttention.k"},
    {Role::kValue, "encoder.block.{}.layer.0.SelfAttention.v"},
    {Role::kOutput, "encoder.block.{}.layer.0.SelfAttention.o"},
    {Role::kDistanceBias, "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias"},
    {Role::kMlpIn, "encoder.block.{}.layer.1.layer_norm"},
    {Role::kGate, "encoder.block.{}.layer.1.DenseReluDense.wi_0"},
    {Role::kUp,
     "encoder.block.{}.layer.1.DenseReluDense.wi_1|encoder.block.{}.layer.1.DenseReluDense.wi"},
    {Role::kDown, "encoder.block.{}.layer.1.DenseReluDense.wo"},
};

ModelSpec spec(Config& c) {
  ModelSpec s;
  s.architecture = "t5";
  s.vocab_size = c.size({"vocab_size"}, 32128);
  s.hidden_size = s.embedding_size = c.size({"d_model"}, 512);
  // Distances are buckets: the model itself has no longest text.
  s.max_context = c.length({"n_positions"}, 2048);
  s.tied_embeddings = c.flag({"tie_word_embeddings"}, true);
  if (c.flag({"scale_decoder_outputs"}, s.tied_embeddings))
    s.logits_scale = static_cast<float>(1 / std::sqrt(double{1} * s.hidden_size));
  Stack stack;
  stack.layers = read_layers(c, {"num_layers"}, 6);
  stack.norm.eps = static_cast<float>(c.number({"layer_norm_epsilon"}, 1e-6));
  AttentionSpec& a = stack.attention;
  a.heads = a.kv_heads = c.size({"num_heads"}, 8);
  a.head_dim = a.value_dim = c.size({"d_kv"}, 64);
  a.bias_buckets = c.count({"relative_attention_num_buckets"}, 32);
  a.bias_distance = c.count({"relative_attention_max_distance"}, 128);
  stack.mlp.ff = c.size({"d_ff"}, 2048);
  const std::string kind = c.text({"feed_forward_proj"}, "relu");
  stack.mlp.gated = kind.starts_with("gated-");
  if (kind == "gated-gelu") {
    stack.mlp.activation = ops::Activation::kGeluTanh;
  } else if (kind == "gated-silu") {
    stack.mlp.activation = ops::Activation::kSilu;
  } else if (kind == "relu") {
    stack.mlp.activation = ops::Activation::kRelu;
  } else {
    c.fail(unsupported("feed_forward_proj '{}' of T5", kind));
  }
  ModelSpec encoder = stack_spec(s, stack);
  encoder.shared_embedding = true;
  stack.layers = read_layers(c, {"num_decoder_layers"}, stack.layers);
  s = stack_spec(s, stack);
  join(s, std::move(encoder), stack);
  return s;
}

}  // namespace t5_model

namespace {

Architecture named_t5(std::string_view type) {
  return {.type = type,
          .spec = t5_model::spec,
          .names = t5_model::kNames,
          .encoder_names = t5_model::kEncoderNames};
}

}  // namespace

Architecture t5() {
  return named_t5("t5");
}
Architecture mt5() {
  return named_t5("mt5");
}

}  // namespace freshet::models

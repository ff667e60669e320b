// BERT and its relatives with learned positions (arXiv:1810.04805): RoBERTa and XLM-R differ in
// their names and in where positions begin.
#include "models/architectures.h"
#include "models/encoder_config.h"

namespace freshet::models {
namespace bert_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "bert.embeddings.word_embeddings"},
    {Role::kPositions, "bert.embeddings.position_embeddings"},
    {Role::kTokenTypes, "bert.embeddings.token_type_embeddings"},
    {Role::kEmbeddedNorm, "bert.embeddings.LayerNorm"},
    {Role::kQuery, "bert.encoder.layer.{}.attention.self.query"},
    {Role::kKey, "bert.encoder.layer.{}.attention.self.key"},
    {Role::kValue, "bert.encoder.layer.{}.attention.self.value"},
    {Role::kOutput, "bert.encoder.layer.{}.attention.output.dense"},
    {Role::kAttentionAfter, "bert.encoder.layer.{}.attention.output.LayerNorm"},
    {Role::kUp, "bert.encoder.layer.{}.intermediate.dense"},
    {Role::kDown, "bert.encoder.layer.{}.output.dense"},
    {Role::kMlpAfter, "bert.encoder.layer.{}.output.LayerNorm"},
};

constexpr NameRule kRobertaNames[] = {
    {Role::kEmbedding, "roberta.embeddings.word_embeddings"},
    {Role::kPositions, "roberta.embeddings.position_embeddings"},
    {Role::kTokenTypes, "roberta.embeddings.token_type_embeddings"},
    {Role::kEmbeddedNorm, "roberta.embeddings.LayerNorm"},
    {Role::kQuery, "roberta.encoder.layer.{}.attention.self.query"},
    {Role::kKey, "roberta.encoder.layer.{}.attention.self.key"},
    {Role::kValue, "roberta.encoder.layer.{}.attention.self.value"},
    {Role::kOutput, "roberta.encoder.layer.{}.attention.output.dense"},
    {Role::kAttentionAfter, "roberta.encoder.layer.{}.attention.output.LayerNorm"},
    {Role::kUp, "roberta.encoder.layer.{}.intermediate.dense"},
    {Role::kDown, "roberta.encoder.layer.{}.output.dense"},
    {Role::kMlpAfter, "roberta.encoder.layer.{}.output.LayerNorm"},
};

// llama.cpp's names.
constexpr NameRule kGgufNames[] = {
    {Role::kAttentionAfter, "blk.{}.attn_output_norm"},
    {Role::kMlpAfter, "blk.{}.layer_output_norm"},
};

ModelSpec bert_spec(Config& c, std::string_view name, const DecoderDefaults& defaults) {
  ModelSpec s = encoder_spec(c, name, defaults);
  for (LayerSpec& layer : s.layers)
    layer.attention().qkv_bias = layer.attention().out_bias = layer.mlp().bias = true;
  return s;
}

constexpr DecoderDefaults defaults_of(int vocab) {
  return {.vocab = vocab,
          .hidden = 768,
          .layers = 12,
          .heads = 12,
          .ff = 3072,
          .context = 512,
          .norm = ops::NormKind::kLayer,
          .norm_bias = true,
          .eps = 1e-12,
          .gated = false,
          .activation = "gelu",
          .rotary = false};
}

ModelSpec spec(Config& c) {
  return bert_spec(c, "bert", defaults_of(30522));
}

ModelSpec roberta_spec(Config& c) {
  ModelSpec s = bert_spec(c, "roberta", defaults_of(50265));
  offset_positions(c, s);
  return s;
}

Architecture named_roberta(std::string_view type) {
  return {.type = type, .spec = roberta_spec, .names = kRobertaNames, .gguf_names = kGgufNames};
}

}  // namespace bert_model

Architecture bert() {
  return {.type = "bert",
          .spec = bert_model::spec,
          .names = bert_model::kNames,
          .gguf_names = bert_model::kGgufNames};
}

Architecture roberta() {
  return bert_model::named_roberta("roberta");
}

Architecture xlm_roberta() {
  return bert_model::named_roberta("xlm-roberta");
}

Architecture camembert() {
  return bert_model::named_roberta("camembert");
}

}  // namespace freshet::models

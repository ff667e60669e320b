// BART (arXiv:1910.13461), mBART, Marian, M2M-100 and NLLB (arXiv:2207.04672), which have sines for
// positions, and Whisper (arXiv:2212.04356), whose decoder is mBART's.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>

#include "models/architectures.h"
#include "models/seq2seq_config.h"

namespace freshet::models {
namespace bart_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "model.shared"},
    {Role::kHeadBias, "final_logits_bias"},
    {Role::kPositions, "model.decoder.embed_positions"},
    {Role::kEmbeddedNorm, "model.decoder.layernorm_embedding"},
    {Role::kFinalNorm, "model.decoder.layer_norm"},
    {Role::kAttentionIn, "model.decoder.layers.{}.self_attn_layer_norm"},
    {Role::kAttentionAfter, "model.decoder.layers.{}.self_attn_layer_norm"},
    {Role::kOutput, "model.decoder.layers.{}.self_attn.out_proj"},
    {Role::kQuery, "model.decoder.layers.{}.self_attn.q_proj"},
    {Role::kKey, "model.decoder.layers.{}.self_attn.k_proj"},
    {Role::kValue, "model.decoder.layers.{}.self_attn.v_proj"},
    {Role::kCrossIn, "model.decoder.layers.{}.encoder_attn_layer_norm"},
    {Role::kCrossAfter, "model.decoder.layers.{}.encoder_attn_layer_norm"},
    {Role::kCrossQuery, "model.decoder.layers.{}.encoder_attn.q_proj"},
    {Role::kCrossKey, "model.decoder.layers.{}.encoder_attn.k_proj"},
    {Role::kCrossValue, "model.decoder.layers.{}.encoder_attn.v_proj"},
    {Role::kCrossOutput, "model.decoder.layers.{}.encoder_attn.out_proj"},
    {Role::kMlpIn, "model.decoder.layers.{}.final_layer_norm"},
    {Role::kMlpAfter, "model.decoder.layers.{}.final_layer_norm"},
    {Role::kUp, "model.decoder.layers.{}.fc1"},
    {Role::kDown, "model.decoder.layers.{}.fc2"},
};

constexpr NameRule kEncoderNames[] = {
    {Role::kEmbedding, "model.shared"},
    {Role::kConvolution1, "model.encoder.conv1"},
    {Role::kConvolution2, "model.encoder.conv2"},
    {Role::kPositions, "model.encoder.embed_positions"},
    {Role::kEmbeddedNorm, "model.encoder.layernorm_embedding"},
    {Role::kFinalNorm, "model.encoder.layer_norm"},
    {Role::kAttentionIn, "model.encoder.layers.{}.self_attn_layer_norm"},
    {Role::kAttentionAfter, "model.encoder.layers.{}.self_attn_layer_norm"},
    {Role::kOutput, "model.encoder.layers.{}.self_attn.out_proj"},
    {Role::kQuery, "model.encoder.layers.{}.self_attn.q_proj"},
    {Role::kKey, "model.encoder.layers.{}.self_attn.k_proj"},
    {Role::kValue, "model.encoder.layers.{}.self_attn.v_proj"},
    {Role::kMlpIn, "model.encoder.layers.{}.final_layer_norm"},
    {Role::kMlpAfter, "model.encoder.layers.{}.final_layer_norm"},
    {Role::kUp, "model.encoder.layers.{}.fc1"},
    {Role::kDown, "model.encoder.layers.{}.fc2"},
};

struct Family {
  std::string_view name;
  int vocab = 50265;
  int64_t positions = 1024;
  int position_offset = 2;
  bool norm_before = false;
  bool embedded_norm = true;
  bool key_bias = true;
  std::string_view activation = "gelu";
  bool scaled = false;
  bool sines = false;  // positions are sines
  bool logits_bias = true;
};

// The stack of a side, "encoder" or "decoder".
Stack read_stack(Config& c, const Family& family, const ModelSpec& s, bool encoder) {
  Stack stack;
  stack.layers = read_layers(c, {encoder ? "encoder_layers" : "decoder_layers"}, 12);
  stack.norm = {.kind = ops::NormKind::kLayer, .eps = 1e-5f, .bias = true};
  stack.norm_before = family.norm_before;
  AttentionSpec& a = stack.attention;
  a.heads = a.kv_heads =
      c.size({encoder ? "encoder_attention_heads" : "decoder_attention_heads"}, 16);
  a.head_dim = a.value_dim = s.hidden_size / a.heads;
  a.scale = static_cast<float>(1 / std::sqrt(double{1} * a.head_dim));
  a.qkv_bias = a.out_bias = true;
  a.key_bias = family.key_bias;
  stack.mlp.gated = false;
  stack.mlp.bias = true;
  stack.mlp.ff = c.size({encoder ? "encoder_ffn_dim" : "decoder_ffn_dim"}, 4096);
  stack.mlp.activation = c.activation({"activation_function"}, family.activation);
  return stack;
}

ModelSpec read(Config& c, const Family& family) {
  ModelSpec s;
  s.architecture = family.name;
  s.vocab_size = c.size({"vocab_size"}, family.vocab);
  s.hidden_size = s.embedding_size = c.size({"d_model"}, 1024);
  s.max_context = c.length({"max_position_embeddings"}, family.positions);
  s.position_offset = family.position_offset;
  s.learned_positions = s.max_context + s.position_offset;
  s.tied_embeddings = c.flag({"tie_word_embeddings"}, true);
  s.logits_bias = family.logits_bias;
  if (family.sines) s.sine_divisor = s.hidden_size / 2;
  if (c.flag({"scale_embedding"}, family.scaled))
    s.embedding_scale = static_cast<float>(std::sqrt(double{1} * s.hidden_size));
  if (family.embedded_norm)
    s.embedded_norm = NormSpec{.kind = ops::NormKind::kLayer, .eps = 1e-5f, .bias = true};
  ModelSpec encoder = stack_spec(s, read_stack(c, family, s, true));
  encoder.shared_embedding = true;
  encoder.logits_bias = false;
  const Stack stack = read_stack(c, family, s, false);
  s = stack_spec(s, stack);
  join(s, std::move(encoder), stack);
  return s;
}

ModelSpec bart_spec(Config& c) {
  return read(c, {.name = "bart"});
}

ModelSpec mbart_spec(Config& c) {
  return read(c, {.name = "mbart", .vocab = 250054, .norm_before = true});
}

ModelSpec marian_spec(Config& c) {
  const int vocab = c.size({"vocab_size"}, 58101);
  if (!c.flag({"share_encoder_decoder_embeddings"}, true) ||
      c.size({"decoder_vocab_size"}, vocab) != vocab)
    c.fail(unsupported("marian with a vocabulary for each side is not supported"));
  return read(c, {.name = "marian",
                  .vocab = 58101,
                  .position_offset = 0,
                  .embedded_norm = false,
                  .sines = true});
}

ModelSpec m2m_100_spec(Config& c) {
  ModelSpec s = read(c, {.name = "m2m_100",
                         .vocab = 128112,
                         .position_offset = c.count({"pad_token_id"}, 1) + 1,
                         .norm_before = true,
                         .embedded_norm = false,
                         .activation = "relu",
                         .scaled = true,
                         .sines = true,
                         .logits_bias = false});
  ModelSpec encoder = *s.encoder;
  s.sine_divisor = encoder.sine_divisor = std::max(1, s.hidden_size / 2 - 1);
  s.encoder = std::make_shared<const ModelSpec>(std::move(encoder));
  return s;
}

}  // namespace bart_model

namespace whisper_model {

constexpr auto named(std::string_view embedding) {
  std::array<NameRule, std::size(bart_model::kNames)> names{};
  for (size_t i = 0; i < names.size(); ++i) {
    names[i] = bart_model::kNames[i];
    if (names[i].role == Role::kEmbedding) names[i].pattern = embedding;
  }
  return names;
}
constexpr auto kNames = named("model.decoder.embed_tokens");

ModelSpec spec(Config& c) {
  const bart_model::Family family{.name = "whisper",
                                  .vocab = 51865,
                                  .norm_before = true,
                                  .embedded_norm = false,
                                  .key_bias = false};
  ModelSpec s;
  s.architecture = family.name;
  s.vocab_size = c.size({"vocab_size"}, family.vocab);
  s.hidden_size = s.embedding_size = c.size({"d_model"}, 384);
  s.tied_embeddings = c.flag({"tie_word_embeddings"}, true);
  if (c.flag({"scale_embedding"}, false))
    s.embedding_scale = static_cast<float>(std::sqrt(double{1} * s.hidden_size));
  s.max_context = s.learned_positions = c.length({"max_source_positions"}, 1500);
  ModelSpec encoder = stack_spec(s, bart_model::read_stack(c, family, s, true));
  encoder.stem = AudioStemSpec{c.size({"num_mel_bins"}, 80)};
  FeatureSpec stream;
  stream.width = s.hidden_size;
  stream.use = FeatureSpec::Use::kStream;
  encoder.features = stream;
  s.max_context = s.learned_positions = c.length({"max_target_positions"}, 448);
  const Stack stack = bart_model::read_stack(c, family, s, false);
  s = stack_spec(s, stack);
  join(s, std::move(encoder), stack);
  return s;
}

}  // namespace whisper_model

Architecture bart() {
  return {.type = "bart",
          .spec = bart_model::bart_spec,
          .names = bart_model::kNames,
          .encoder_names = bart_model::kEncoderNames};
}
Architecture mbart() {
  return {.type = "mbart",
          .spec = bart_model::mbart_spec,
          .names = bart_model::kNames,
          .encoder_names = bart_model::kEncoderNames};
}
Architecture marian() {
  return {.type = "marian",
          .spec = bart_model::marian_spec,
          .names = bart_model::kNames,
          .encoder_names = bart_model::kEncoderNames};
}
Architecture m2m_100() {
  return {.type = "m2m_100",
          .spec = bart_model::m2m_100_spec,
          .names = bart_model::kNames,
          .encoder_names = bart_model::kEncoderNames};
}
Architecture whisper() {
  return {.type = "whisper",
          .spec = whisper_model::spec,
          .names = whisper_model::kNames,
          .encoder_names = bart_model::kEncoderNames};
}

}  // namespace freshet::models

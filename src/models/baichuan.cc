// Baichuan 7B, which is Llama with one matrix for queries, keys and values, and 13B, which has
// ALiBi in place of rotation.
#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace baichuan_model {

constexpr int kLargeLayers = 40;  // of 13B: no key of the configuration names ALiBi
constexpr int kSecondVocab = 125696;

constexpr NameRule kNames[] = {{Role::kQkv, "model.layers.{}.self_attn.W_pack"}};

ModelSpec spec(Config& c) {
  const bool large = c.size({"num_hidden_layers"}, 32) == kLargeLayers;
  ModelSpec s = decoder_spec(
      c, "baichuan",
      {.vocab = 64000, .context = c.length({"model_max_length"}, 4096), .rotary = !large});
  if (large) {
    for (LayerSpec& layer : s.layers)
      layer.attention().slopes = alibi_slopes(layer.attention().heads);
  }
  // Baichuan 2 divides the rows of its head by their norms; GGUF files hold the result.
  if (s.vocab_size == kSecondVocab && c.has("model_max_length"))
    c.fail(unsupported("baichuan 2 in safetensors is not supported: use a GGUF file"));
  return s;
}

}  // namespace baichuan_model

Architecture baichuan() {
  return {.type = "baichuan",
          .spec = baichuan_model::spec,
          .names = baichuan_model::kNames,
          .gguf_interleaves = true};
}

}  // namespace freshet::models

// Llama 3.2 Vision (mllama): Llama, some of whose layers attend to pictures and to nothing else.
#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace mllama_model {

constexpr NameRule kNames[] = {
    {Role::kCrossIn, "model.layers.{}.input_layernorm"},
    {Role::kCrossQuery, "model.layers.{}.cross_attn.q_proj"},
    {Role::kCrossKey, "model.layers.{}.cross_attn.k_proj"},
    {Role::kCrossValue, "model.layers.{}.cross_attn.v_proj"},
    {Role::kCrossOutput, "model.layers.{}.cross_attn.o_proj"},
    {Role::kCrossQueryNorm, "model.layers.{}.cross_attn.q_norm"},
    {Role::kCrossKeyNorm, "model.layers.{}.cross_attn.k_norm"},
    {Role::kCrossGate, "model.layers.{}.cross_attn_attn_gate"},
    {Role::kMlpGate, "model.layers.{}.cross_attn_mlp_gate"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "mllama",
                             {.vocab = 128256,
                              .hidden = 4096,
                              .layers = 40,
                              .heads = 32,
                              .kv_heads = 8,
                              .ff = 14336,
                              .context = 131072,
                              .eps = 1e-5,
                              .rope = {.theta = 500000.0}});
  std::vector<float> crossing = {3, 8, 13, 18, 23, 28, 33, 38};
  if (c.has("cross_attention_layers")) crossing = c.floats({"cross_attention_layers"});
  for (const float index : crossing) {
    const auto at = static_cast<size_t>(index);
    if (index < 0 || at >= s.layers.size()) {
      c.fail(invalid_argument("the configuration's 'cross_attention_layers' names layer {} of {}",
                              index, s.layers.size()));
      break;
    }
    LayerSpec& layer = s.layers[at];
    const AttentionSpec* const own = layer.find<AttentionSpec>();
    if (own == nullptr) continue;  // named twice
    CrossAttentionSpec cross;
    cross.heads = own->heads;
    cross.kv_heads = own->kv_heads;
    cross.head_dim = own->head_dim;
    cross.scale = own->scale;
    cross.encoder_size = s.hidden_size;
    cross.encoder_length = 1;  // set by the tower
    cross.qk_norm = own->qk_norm_spec;
    cross.pictures = true;
    cross.tanh_gate = true;
    layer.mlp().sighted = true;
    layer.mlp().tanh_gate = true;
    layer.branches.front().body = cross;
  }
  return s;
}

}  // namespace mllama_model

Architecture mllama() {
  return {.type = "mllama_text_model", .spec = mllama_model::spec, .names = mllama_model::kNames};
}

}  // namespace freshet::models

#include <cmath>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gemma2_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionOut, "model.layers.{}.post_attention_layernorm"},
    {Role::kMlpIn, "model.layers.{}.pre_feedforward_layernorm"},
    {Role::kMlpOut, "model.layers.{}.post_feedforward_layernorm"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gemma2",
                             {.vocab = 256000,
                              .hidden = 2304,
                              .layers = 26,
                              .heads = 8,
                              .kv_heads = 4,
                              .head_dim = 256,
                              .ff = 9216,
                              .context = 8192,
                              .tied = true,
                              .activation = "gelu_pytorch_tanh"});
  s.embedding_scale = std::sqrt(static_cast<float>(s.hidden_size));
  s.logits_softcap = static_cast<float>(
      c.has_null("final_logit_softcapping") ? 0 : c.number({"final_logit_softcapping"}, 30));
  const double cap =
      c.has_null("attn_logit_softcapping") ? 0 : c.number({"attn_logit_softcapping"}, 50);
  const double scalar = c.number({"query_pre_attn_scalar"}, 256);
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().softcap = static_cast<float>(cap);
    layer.attention().scale = static_cast<float>(1 / std::sqrt(scalar));
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    for (BranchSpec& branch : layer.branches) branch.norms.out = branch.norms.in;
  }
  set_windows(c, s, c.has_null("sliding_window") ? 0 : c.count({"sliding_window"}, 4096),
              [](int layer) { return layer % 2 == 0; });
  return s;
}

}  // namespace gemma2_model

Architecture gemma2() {
  return {.type = "gemma2",
          .spec = gemma2_model::spec,
          .names = gemma2_model::kNames,
          .norms_less_one = true};
}

}  // namespace freshet::models

#include <cmath>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gemma3_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionOut, "model.layers.{}.post_attention_layernorm"},
    {Role::kMlpIn, "model.layers.{}.pre_feedforward_layernorm"},
    {Role::kMlpOut, "model.layers.{}.post_feedforward_layernorm"},
};

// Rope scaling applies to global layers only; local ones have their own base.
void set_ropes(Config& c, ModelSpec& s) {
  const int head_dim = s.layers.front().attention().head_dim;
  const RopeDefaults global{
      .theta = 1e6, .layer_type = "full_attention", .max_context = s.max_context};
  RopeSpec local;
  const json::Value* parameters = c.find({"rope_parameters"});
  if (parameters != nullptr && parameters->find("sliding_attention") != nullptr) {
    local =
        read_rope(c, head_dim,
                  {.theta = 1e4, .layer_type = "sliding_attention", .max_context = s.max_context});
  } else {
    local.theta = c.number({"rope_local_base_freq"}, 1e4);
    local.rotary_dim = head_dim;
  }
  s.ropes = {read_rope(c, head_dim, global), local};
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gemma3",
                             {.vocab = 262208,
                              .hidden = 2304,
                              .layers = 26,
                              .heads = 8,
                              .kv_heads = 4,
                              .head_dim = 256,
                              .ff = 9216,
                              .context = 131072,
                              .tied = true,
                              .activation = "gelu_pytorch_tanh",
                              .rotary = false});
  set_ropes(c, s);
  s.embedding_scale = std::sqrt(static_cast<float>(s.hidden_size));
  s.logits_softcap = static_cast<float>(c.number({"final_logit_softcapping"}, 0));
  const double scalar = c.number({"query_pre_attn_scalar"}, 256);
  const int pattern = c.size({"sliding_window_pattern", "_sliding_window_pattern"}, 6);
  const bool bias = c.flag({"attention_bias"}, false);
  set_windows(c, s, c.has_null("sliding_window") ? 0 : c.count({"sliding_window"}, 4096),
              [&](int layer) { return (layer + 1) % pattern != 0; });
  const std::vector<std::string> types = c.texts({"layer_types"});
  for (size_t i = 0; i < s.layers.size(); ++i) {
    LayerSpec& layer = s.layers[i];
    // By the layer's type and not by its window, which is 0 if it exceeds the context.
    const bool local = i < types.size() ? types[i] == "sliding_attention"
                                        : (static_cast<int>(i) + 1) % pattern != 0;
    layer.attention().rope = local ? 1 : 0;
    layer.attention().softcap = static_cast<float>(c.number({"attn_logit_softcapping"}, 0));
    layer.attention().scale = static_cast<float>(1 / std::sqrt(scalar));
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().qk_norm = QkNorm::kHead;
    for (BranchSpec& branch : layer.branches) branch.norms.out = branch.norms.in;
  }
  return s;
}

}  // namespace gemma3_model

Architecture gemma3() {
  return {.type = "gemma3_text",
          .spec = gemma3_model::spec,
          .names = gemma3_model::kNames,
          .norms_less_one = true};
}

}  // namespace freshet::models

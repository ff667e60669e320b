#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace stablelm_model {

constexpr NameRule kNames[] = {
    {Role::kQueryNorm, "model.layers.{}.self_attn.q_layernorm.norms.{e}"},
    {Role::kKeyNorm, "model.layers.{}.self_attn.k_layernorm.norms.{e}"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "stablelm",
                             {.vocab = 50304,
                              .hidden = 2560,
                              .kv_heads = 32,
                              .ff = 6912,
                              .context = 4096,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .rope = {.partial = 0.25}});
  const bool bias = c.flag({"use_qkv_bias"}, false);
  const bool qk_norm = c.flag({"qk_layernorm"}, false);
  const bool parallel = c.flag({"use_parallel_residual"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = bias;
    if (qk_norm) layer.attention().qk_norm = QkNorm::kHeadDistinct;
    layer.attention().qk_norm_spec.bias = false;
    layer.parallel = parallel;
    if (parallel) layer.branches.back().norms.in.reset();
  }
  return s;
}

}  // namespace stablelm_model

Architecture stablelm() {
  return {.type = "stablelm", .spec = stablelm_model::spec, .names = stablelm_model::kNames};
}

}  // namespace freshet::models

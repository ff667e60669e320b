#include <cmath>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace hunyuan_dense_model {

constexpr NameRule kNames[] = {
    {Role::kQueryNorm, "model.layers.{}.self_attn.query_layernorm"},
    {Role::kKeyNorm, "model.layers.{}.self_attn.key_layernorm"},
};

// "dynamic" with an alpha is a larger base, whatever the context.
void fix_base(Config& c, RopeSpec& rope) {
  double alpha = 0;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const json::Value* p = c.find({name});
    if (p != nullptr && p->is_object() && alpha == 0) alpha = p->get_double("alpha", 0);
  }
  if (rope.scaling != RopeSpec::Scaling::kDynamic || alpha == 0) return;
  const double dim = rope.rotary_dim;
  rope.scaling = RopeSpec::Scaling::kNone;
  rope.theta *= std::pow(alpha, dim / (dim - 2));
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "hunyuan_v1_dense", {.vocab = 290943, .eps = 1e-5});
  fix_base(c, s.ropes.front());
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.qkv_bias = a.out_bias = bias;
    a.qk_norm = QkNorm::kHead;
    a.norm_after_rope = true;
  }
  return s;
}

}  // namespace hunyuan_dense_model

Architecture hunyuan_dense() {
  return {.type = "hunyuan_v1_dense",
          .spec = hunyuan_dense_model::spec,
          .names = hunyuan_dense_model::kNames};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace granite_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "granite", {});
  s.embedding_scale = static_cast<float>(c.number({"embedding_multiplier"}, 1));
  s.residual_scale = static_cast<float>(c.number({"residual_multiplier"}, 1));
  const double divisor = c.number({"logits_scaling", "logit_scale"}, 1);
  if (divisor == 0) c.fail(invalid_argument("the configuration's 'logits_scaling' must not be 0"));
  s.logits_scale = static_cast<float>(1 / divisor);
  const double scale = c.number({"attention_multiplier"}, 1);
  const bool attention_bias = c.flag({"attention_bias"}, false);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().scale = static_cast<float>(scale);
    layer.attention().qkv_bias = attention_bias;
    layer.attention().out_bias = c.flag({"attention_out_bias"}, attention_bias);
    layer.mlp().bias = mlp_bias;
  }
  return s;
}

}  // namespace granite_model

Architecture granite() {
  return {.type = "granite", .spec = granite_model::spec, .gguf_interleaves = true};
}

}  // namespace freshet::models

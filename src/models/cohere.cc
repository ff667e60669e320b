#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace cohere_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "cohere",
                             {.vocab = 256000,
                              .hidden = 8192,
                              .layers = 40,
                              .heads = 64,
                              .ff = 22528,
                              .context = 8192,
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .eps = 1e-5,
                              .rope = {.theta = 500000, .interleaved = true}});
  s.logits_scale = static_cast<float>(c.number({"logit_scale"}, 0.0625));
  const bool bias = c.flag({"attention_bias"}, false);
  const bool qk_norm = c.flag({"use_qk_norm"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    if (qk_norm) layer.attention().qk_norm = QkNorm::kHeadDistinct;
    layer.parallel = true;
    layer.branches.back().norms.in.reset();
  }
  return s;
}

}  // namespace cohere_model

Architecture cohere() {
  return {.type = "cohere", .spec = cohere_model::spec};
}

}  // namespace freshet::models

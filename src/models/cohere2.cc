#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace cohere2_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "cohere2",
                             {.vocab = 256000,
                              .hidden = 8192,
                              .layers = 40,
                              .heads = 64,
                              .ff = 22528,
                              .context = 8192,
                              .tied = true,
                              .norm = ops::NormKind::kLayer,
                              .eps = 1e-5,
                              .rope = {.interleaved = true}});
  s.logits_scale = static_cast<float>(c.number({"logit_scale"}, 0.0625));
  const int pattern = c.size({"sliding_window_pattern"}, 4);
  const auto local = local_layers(c, [&](int layer) { return (layer + 1) % pattern != 0; });
  set_windows(c, s, c.has_null("sliding_window") ? 0 : c.count({"sliding_window"}, 4096), local);
  const bool bias = c.flag({"attention_bias"}, false);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    AttentionSpec& a = s.layers[i].attention();
    a.qkv_bias = a.out_bias = bias;
    if (!local(static_cast<int>(i))) a.rope = -1;
    s.layers[i].parallel = true;
    s.layers[i].branches.back().norms.in.reset();
  }
  return s;
}

}  // namespace cohere2_model

Architecture cohere2() {
  return {.type = "cohere2", .spec = cohere2_model::spec};
}

}  // namespace freshet::models

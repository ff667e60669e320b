#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace smollm3_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "smollm3",
                             {.vocab = 128256,
                              .hidden = 2048,
                              .layers = 36,
                              .heads = 16,
                              .kv_heads = 4,
                              .ff = 11008,
                              .context = 32768,
                              .tied = true,
                              .rope = {.theta = 2e6}});
  const std::function<bool(int)> rotates = rotating_layers(c, s);
  const bool slides = c.flag({"use_sliding_window"}, false);
  set_windows(c, s, slides ? c.count({"sliding_window"}, 0) : 0,
              [&](int layer) { return !rotates(layer); });
  const bool bias = c.flag({"attention_bias"}, false);
  const bool mlp_bias = c.flag({"mlp_bias"}, false);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    AttentionSpec& a = s.layers[i].attention();
    a.qkv_bias = a.out_bias = bias;
    if (!rotates(static_cast<int>(i))) a.rope = -1;
    s.layers[i].mlp().bias = mlp_bias;
  }
  return s;
}

}  // namespace smollm3_model

Architecture smollm3() {
  return {.type = "smollm3", .spec = smollm3_model::spec, .gguf_interleaves = true};
}

}  // namespace freshet::models

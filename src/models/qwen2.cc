#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace qwen2_model {

ModelSpec spec(Config& c) {
  ModelSpec s =
      decoder_spec(c, "qwen2", {.vocab = 151936, .kv_heads = 32, .ff = 22016, .context = 32768});
  const int first = c.count({"max_window_layers"}, 28);
  const bool use = c.flag({"use_sliding_window"}, false);
  set_windows(c, s, use ? c.count({"sliding_window"}, 4096) : 0,
              [&](int layer) { return layer >= first; });
  for (LayerSpec& layer : s.layers) layer.attention().qkv_bias = true;
  return s;
}

}  // namespace qwen2_model

Architecture qwen2() {
  return {.type = "qwen2", .spec = qwen2_model::spec};
}

}  // namespace freshet::models

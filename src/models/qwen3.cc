#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace qwen3_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "qwen3",
      {.vocab = 151936, .kv_heads = 32, .head_dim = 128, .ff = 22016, .context = 32768});
  const int first = c.count({"max_window_layers"}, 28);
  const bool use = c.flag({"use_sliding_window"}, false);
  set_windows(c, s, use ? c.count({"sliding_window"}, 4096) : 0,
              [&](int layer) { return layer >= first; });
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qk_norm = QkNorm::kHead;
    layer.attention().qkv_bias = bias;
    layer.attention().out_bias = c.flag({"attention_out_bias"}, bias);
  }
  return s;
}

}  // namespace qwen3_model

Architecture qwen3() {
  return {.type = "qwen3", .spec = qwen3_model::spec};
}

}  // namespace freshet::models

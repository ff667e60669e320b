#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/sparse_layers.h"

namespace freshet::models {
namespace qwen3_moe_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "qwen3_moe",
      {.vocab = 151936, .hidden = 2048, .layers = 24, .kv_heads = 4, .ff = 6144, .context = 32768});
  const bool use = c.flag({"use_sliding_window"}, false);
  set_windows(c, s, use ? c.count({"sliding_window"}, 4096) : 0, [](int) { return true; });
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qk_norm = QkNorm::kHead;
    layer.attention().qkv_bias = bias;
    layer.attention().out_bias = c.flag({"attention_out_bias"}, bias);
  }

  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 768);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.experts = c.size({"num_experts", "num_local_experts"}, 128);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 8);
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, false);
  set_experts(s, moe, sparse_layers(c));
  return s;
}

}  // namespace qwen3_moe_model

Architecture qwen3_moe() {
  return {.type = "qwen3_moe", .spec = qwen3_moe_model::spec};
}

}  // namespace freshet::models

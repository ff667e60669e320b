#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/sparse_layers.h"

namespace freshet::models {
namespace qwen2_moe_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "qwen2_moe",
                             {.vocab = 151936,
                              .hidden = 2048,
                              .layers = 24,
                              .heads = 16,
                              .kv_heads = 16,
                              .ff = 5632,
                              .context = 32768});
  const int first = c.count({"max_window_layers"}, 28);
  const bool use = c.flag({"use_sliding_window"}, false);
  set_windows(c, s, use ? c.count({"sliding_window"}, 4096) : 0,
              [&](int layer) { return layer % 2 == 0 && layer < first; });
  const bool bias = c.flag({"qkv_bias"}, true);
  for (LayerSpec& layer : s.layers) layer.attention().qkv_bias = bias;

  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 1408);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = c.size({"shared_expert_intermediate_size"}, 5632);
  moe.shared_gate = true;
  moe.routing.experts = c.size({"num_experts", "num_local_experts"}, 60);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 4);
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, false);
  set_experts(s, moe, sparse_layers(c));
  return s;
}

}  // namespace qwen2_moe_model

Architecture qwen2_moe() {
  return {.type = "qwen2_moe", .spec = qwen2_moe_model::spec};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace olmoe_model {

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "olmoe",
                             {.vocab = 50304,
                              .hidden = 2048,
                              .layers = 16,
                              .heads = 16,
                              .ff = 2048,
                              .context = 4096,
                              .eps = 1e-5});
  if (c.has("clip_qkv"))
    c.fail(unsupported("'clip_qkv' of olmoe is not supported: it must be null"));
  const bool bias = c.flag({"attention_bias"}, false);
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.experts = c.size({"num_experts", "num_local_experts"}, 64);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 8);
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, false);
  set_experts(s, moe, [](int) { return true; });
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().qk_norm = QkNorm::kFull;
  }
  return s;
}

}  // namespace olmoe_model

Architecture olmoe() {
  return {.type = "olmoe", .spec = olmoe_model::spec};
}

}  // namespace freshet::models

// The language models of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL:
// those of Qwen2 and Qwen3, the latter with or without experts, with positions on three axes.
#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/rope_config.h"
#include "models/sparse_layers.h"

namespace freshet::models {
namespace qwen_vl_model {

ModelSpec qwen2(Config& c) {
  ModelSpec s =
      decoder_spec(c, "qwen2-vl", {.vocab = 152064, .kv_heads = 8, .ff = 29568, .context = 32768});
  if (c.flag({"use_sliding_window"}, false))
    c.fail(unsupported("sliding windows in a language model that reads pictures"));
  for (LayerSpec& layer : s.layers) layer.attention().qkv_bias = true;
  set_rope_axes(c, s, {16, 24, 24}, false);
  return s;
}

ModelSpec qwen3_like(Config& c, std::string_view name, const DecoderDefaults& defaults) {
  ModelSpec s = decoder_spec(c, name, defaults);
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qk_norm = QkNorm::kHead;
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
  }
  set_rope_axes(c, s, {24, 20, 20}, true);
  return s;
}

ModelSpec qwen3(Config& c) {
  return qwen3_like(c, "qwen3-vl",
                    {.vocab = 151936,
                     .kv_heads = 32,
                     .head_dim = 128,
                     .ff = 22016,
                     .context = 128000,
                     .rope = {.theta = 500000.0}});
}

ModelSpec qwen3_experts(Config& c) {
  ModelSpec s = qwen3_like(c, "qwen3-vl-moe",
                           {.vocab = 151936,
                            .hidden = 2048,
                            .layers = 24,
                            .heads = 16,
                            .kv_heads = 16,
                            .ff = 5632,
                            .context = 128000,
                            .rope = {.theta = 500000.0}});
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 1408);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.experts = c.size({"num_experts", "num_local_experts"}, 60);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 4);
  moe.routing.renormalize = true;
  set_experts(s, moe, sparse_layers(c));
  return s;
}

}  // namespace qwen_vl_model

Architecture qwen2_vl() {
  return {.type = "qwen2_vl_text", .spec = qwen_vl_model::qwen2};
}
Architecture qwen2_5_vl() {
  return {.type = "qwen2_5_vl_text", .spec = qwen_vl_model::qwen2};
}
Architecture qwen3_vl() {
  return {.type = "qwen3_vl_text", .spec = qwen_vl_model::qwen3};
}
Architecture qwen3_vl_moe() {
  return {.type = "qwen3_vl_moe_text",
          .spec = qwen_vl_model::qwen3_experts,
          .experts_transposed = true};
}

}  // namespace freshet::models

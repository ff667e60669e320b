#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace gpt_oss_model {

constexpr NameRule kNames[] = {{Role::kRouter, "model.layers.{}.mlp.router"}};
constexpr NameRule kGgufNames[] = {
    {Role::kMlpIn, "blk.{}.post_attention_norm"},
    {Role::kAttentionOut, ""},
};

// The published YaRN, for configurations that leave it out.
void default_rope(ModelSpec& s) {
  RopeSpec& rope = s.ropes.front();
  rope.scaling = RopeSpec::Scaling::kYarn;
  rope.factor = 32;
  rope.original_context = 4096;
  rope.truncate = false;
  rope.attention_factor = 1.3465735902799727f;  // 0.1 ln 32 + 1
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "gpt_oss",
                             {.vocab = 201088,
                              .hidden = 2880,
                              .layers = 36,
                              .heads = 64,
                              .kv_heads = 8,
                              .head_dim = 64,
                              .ff = 2880,
                              .context = 131072,
                              .eps = 1e-5,
                              .rope = {.theta = 150000}});
  if (!c.has("rope_scaling") && !c.has("rope_parameters")) default_rope(s);
  const bool bias = c.flag({"attention_bias"}, true);

  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu = {ops::Activation::kSilu, static_cast<float>(c.number({"swiglu_limit"}, 7)), 1.702f};
  moe.router_bias = moe.expert_bias = true;
  moe.routing.score = ops::Routing::Score::kTopkSoftmax;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 128);
  moe.routing.top_k = c.size({"num_experts_per_tok", "experts_per_token"}, 4);
  set_experts(s, moe, [](int) { return true; });
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
    layer.attention().sinks = true;
  }
  set_windows(c, s, c.has_null("sliding_window") ? 0 : c.count({"sliding_window"}, 128),
              [](int layer) { return layer % 2 == 0; });
  return s;
}

}  // namespace gpt_oss_model

Architecture gpt_oss() {
  return {.type = "gpt_oss",
          .spec = gpt_oss_model::spec,
          .names = gpt_oss_model::kNames,
          .gguf_names = gpt_oss_model::kGgufNames,
          .experts_transposed = true,
          .experts_interleaved = true};
}

}  // namespace freshet::models

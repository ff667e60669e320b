#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace phimoe_model {

constexpr NameRule kNames[] = {
    {Role::kRouter, "model.layers.{}.block_sparse_moe.gate"},
    {Role::kExpertGate, "model.layers.{}.block_sparse_moe.experts.{e}.w1"},
    {Role::kExpertUp, "model.layers.{}.block_sparse_moe.experts.{e}.w3"},
    {Role::kExpertDown, "model.layers.{}.block_sparse_moe.experts.{e}.w2"},
};

// LongRoPE whose scale is given for short and for long contexts.
void set_scale(Config& c, ModelSpec& s) {
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const json::Value* p = c.find({name});
    if (p == nullptr || !p->is_object()) continue;
    RopeSpec& rope = s.ropes.front();
    if (rope.scaling != RopeSpec::Scaling::kLongRope || p->find("short_mscale") == nullptr) return;
    const double in_short = p->get_double("short_mscale", 1);
    const double in_long = p->get_double("long_mscale", 1);
    rope.attention_factor = static_cast<float>(in_long);
    if (in_short != in_long) {
      c.fail(
          unsupported("a long_mscale of {} and a short_mscale of {} are not supported: they "
                      "must be equal",
                      in_long, in_short));
    }
    return;
  }
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "phimoe",
                             {.vocab = 32064,
                              .kv_heads = 8,
                              .ff = 6400,
                              .context = int64_t{4096} * 32,
                              .norm = ops::NormKind::kLayer,
                              .norm_bias = true,
                              .eps = 1e-5,
                              .rope = {.theta = 1e6}});
  set_scale(c, s);
  s.logits_bias = c.flag({"lm_head_bias"}, false);
  const bool bias = c.flag({"attention_bias"}, false);
  const int window = c.count({"sliding_window"}, 0);
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.score = ops::Routing::Score::kSparsemixer;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 16);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 2);
  moe.routing.tolerance = static_cast<float>(2 * c.number({"router_jitter_noise"}, 0.01));
  set_experts(s, moe, [](int) { return true; });
  for (LayerSpec& layer : s.layers) {
    layer.attention().qkv_bias = bias;
    layer.attention().out_bias = c.flag({"attention_out_bias"}, bias);
    layer.attention().window = window >= s.max_context ? 0 : window;
  }
  return s;
}

}  // namespace phimoe_model

Architecture phimoe() {
  return {.type = "phimoe", .spec = phimoe_model::spec, .names = phimoe_model::kNames};
}

}  // namespace freshet::models

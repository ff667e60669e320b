#include <algorithm>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace llama4_model {

constexpr NameRule kNames[] = {
    {Role::kGate, "model.layers.{}.feed_forward.gate_proj"},
    {Role::kUp, "model.layers.{}.feed_forward.up_proj"},
    {Role::kDown, "model.layers.{}.feed_forward.down_proj"},
    {Role::kRouter, "model.layers.{}.feed_forward.router"},
    {Role::kExpertsGateUp, "model.layers.{}.feed_forward.experts.gate_up_proj"},
    {Role::kExpertsDown, "model.layers.{}.feed_forward.experts.down_proj"},
    {Role::kSharedGate, "model.layers.{}.feed_forward.shared_expert.gate_proj"},
    {Role::kSharedUp, "model.layers.{}.feed_forward.shared_expert.up_proj"},
    {Role::kSharedDown, "model.layers.{}.feed_forward.shared_expert.down_proj"},
};

// Layers with RoPE attend in chunks; the others, without, attend to everything, with queries that
// grow with their position.
void set_attention(Config& c, ModelSpec& s) {
  const int chunk =
      c.has_null("attention_chunk_size") ? 0 : c.count({"attention_chunk_size"}, 8192);
  const bool norms = c.flag({"use_qk_norm"}, true);
  // Some files say 4 for true.
  const json::Value* said = c.find({"attn_temperature_tuning"});
  const bool tuning = said != nullptr && said->is_number()
                          ? said->as_double() != 0
                          : c.flag({"attn_temperature_tuning"}, true);
  const bool bias = c.flag({"attention_bias"}, false);
  RopeSpec temperature;
  temperature.rotary_dim = s.layers.front().attention().head_dim;
  temperature.scaling = RopeSpec::Scaling::kTemperature;
  temperature.factor = c.number({"attn_scale"}, 0.1);
  temperature.original_context = c.number({"floor_scale"}, 8192);
  if (tuning) s.ropes.push_back(temperature);
  const std::function<bool(int)> rotates = rotating_layers(c, s);
  const std::function<bool(int)> local = local_layers(c, rotates);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    const auto layer = static_cast<int>(i);
    AttentionSpec& a = s.layers[i].attention();
    a.qkv_bias = a.out_bias = bias;
    if (local(layer) && chunk < s.max_context) a.chunk = chunk;
    a.rotates_keys = rotates(layer) || !tuning;
    if (!rotates(layer)) a.rope = tuning ? 1 : -1;
    // The norm has no weights, so that it may as well come before the rotation.
    if (norms && rotates(layer)) a.qk_norm = QkNorm::kHead;
    a.qk_norm_spec.weight = false;
  }
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "llama4",
                             {.vocab = 202048,
                              .hidden = 5120,
                              .layers = 48,
                              .heads = 40,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .ff = 8192,
                              .context = int64_t{4096} * 32,
                              .eps = 1e-5,
                              .rope = {.theta = 5e5, .interleaved = true}});
  set_attention(c, s);
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, s.layers.front().mlp().ff);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = moe.expert_ff;
  moe.weight_before = true;
  moe.routing.score = ops::Routing::Score::kSigmoid;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 16);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 1);
  const int dense_ff = c.size({"intermediate_size_mlp", "intermediate_size"}, 16384);
  for (LayerSpec& layer : s.layers) layer.mlp().ff = dense_ff;
  const std::vector<float> listed = c.floats({"moe_layers"});
  const int step = c.size({"interleave_moe_layer_step"}, 1);
  set_experts(s, moe, [&](int layer) {
    if (!c.has("moe_layers")) return (layer + 1) % step == 0;
    return std::find(listed.begin(), listed.end(), static_cast<float>(layer)) != listed.end();
  });
  return s;
}

}  // namespace llama4_model

Architecture llama4() {
  return {.type = "llama4_text",
          .spec = llama4_model::spec,
          .names = llama4_model::kNames,
          .experts_transposed = true};
}

}  // namespace freshet::models

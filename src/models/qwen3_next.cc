// Qwen3-Next and Qwen3.5: gated delta nets (arXiv:2412.06464) and gated attention.
#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/rope_config.h"
#include "models/sparse_layers.h"
#include "models/state_config.h"

namespace freshet::models {
namespace qwen3_next_model {

MoeSpec read_experts(Config& c, const ModelSpec& s) {
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 512);
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.shared_ff = c.count({"shared_expert_intermediate_size"}, 512);
  moe.shared_gate = moe.shared_ff > 0;
  moe.routing.experts = c.size({"num_experts"}, 512);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 10);
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, true);
  return moe;
}

// Gated attention in every fourth layer, gated delta nets in the others.
ModelSpec read(Config& c, std::string_view name, const DecoderDefaults& defaults) {
  ModelSpec s = decoder_spec(c, name, defaults);
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.qk_norm = QkNorm::kHead;
    a.output_gate = true;
    a.qkv_bias = a.out_bias = bias;
  }
  DeltaNetSpec net;
  net.key_heads = c.size({"linear_num_key_heads"}, 16);
  net.value_heads = c.size({"linear_num_value_heads"}, 32);
  net.key_dim = c.size({"linear_key_head_dim"}, 128);
  net.value_dim = c.size({"linear_value_head_dim"}, 128);
  net.taps = c.size({"linear_conv_kernel_dim"}, 4);
  net.norm.eps = s.final_norm->eps;
  net.tiled = c.flag({"tiled_value_heads"}, false);  // in GGUF files alone
  const int interval = c.size({"full_attention_interval"}, 4);
  std::vector<bool> attends = attention_layers(c, s, {"full_attention"}, {"linear_attention"});
  if (!c.has("layer_types")) {
    for (size_t i = 0; i < attends.size(); ++i)
      attends[i] = (static_cast<int>(i) + 1) % interval == 0;
  }
  set_state_layers(s, net, [&](int layer) { return attends[static_cast<size_t>(layer)]; });
  return s;
}

ModelSpec spec(Config& c) {
  ModelSpec s = read(c, "qwen3_next",
                     {.vocab = 151936,
                      .hidden = 2048,
                      .layers = 48,
                      .heads = 16,
                      .kv_heads = 2,
                      .head_dim = 256,
                      .ff = 5632,
                      .context = 32768,
                      .rope = {.partial = 0.25}});
  set_experts(s, read_experts(c, s), sparse_layers(c));
  return s;
}

// Positions on three axes, in models that read pictures.
void read_axes(Config& c, ModelSpec& s) {
  const json::Value* const rope = c.find({"rope_parameters", "rope_scaling"});
  if (rope == nullptr || !rope->is_object() || rope->find("mrope_section") == nullptr) return;
  set_rope_axes(c, s, {11, 11, 10}, true);
}

ModelSpec dense_spec(Config& c) {
  ModelSpec s = read(c, "qwen3_5",
                     {.vocab = 248320,
                      .hidden = 4096,
                      .layers = 32,
                      .heads = 16,
                      .kv_heads = 4,
                      .head_dim = 256,
                      .ff = 12288,
                      .context = 32768,
                      .rope = {.partial = 0.25}});
  read_axes(c, s);
  return s;
}

ModelSpec moe_spec(Config& c) {
  ModelSpec s = read(c, "qwen3_5_moe",
                     {.vocab = 248320,
                      .hidden = 2048,
                      .layers = 40,
                      .heads = 16,
                      .kv_heads = 2,
                      .head_dim = 256,
                      .ff = 512,
                      .context = 32768,
                      .rope = {.partial = 0.25}});
  MoeSpec moe = read_experts(c, s);
  moe.routing.experts = c.size({"num_experts"}, 256);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 8);
  moe.routing.renormalize = true;
  set_experts(s, moe, [](int) { return true; });
  read_axes(c, s);
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kStateIn, "model.layers.{}.linear_attn.in_proj_qkvz"},
    {Role::kStateGates, "model.layers.{}.linear_attn.in_proj_ba"},
    {Role::kStateConv, "model.layers.{}.linear_attn.conv1d"},
    {Role::kStateA, "model.layers.{}.linear_attn.A_log"},
    {Role::kStateDtBias, "model.layers.{}.linear_attn.dt_bias"},
    {Role::kStateNorm, "model.layers.{}.linear_attn.norm"},
    {Role::kStateOut, "model.layers.{}.linear_attn.out_proj"},
};

// Qwen3.5 has the parts of the input projections in matrices of their own.
constexpr NameRule kSplitNames[] = {
    {Role::kStateIn, "model.layers.{}.linear_attn.in_proj_qkv"},
    {Role::kStateZ, "model.layers.{}.linear_attn.in_proj_z"},
    {Role::kStateGates, "model.layers.{}.linear_attn.in_proj_b"},
    {Role::kStateDt, "model.layers.{}.linear_attn.in_proj_a"},
    {Role::kStateConv, "model.layers.{}.linear_attn.conv1d"},
    {Role::kStateA, "model.layers.{}.linear_attn.A_log"},
    {Role::kStateDtBias, "model.layers.{}.linear_attn.dt_bias"},
    {Role::kStateNorm, "model.layers.{}.linear_attn.norm"},
    {Role::kStateOut, "model.layers.{}.linear_attn.out_proj"},
};

// Early files have the four parts in one matrix, as the folder does.
constexpr NameRule kGgufNames[] = {
    {Role::kMlpIn, "blk.{}.post_attention_norm"},
    {Role::kStateIn, "blk.{}.attn_qkv|blk.{}.ssm_in"},
    {Role::kStateZ, "blk.{}.attn_gate"},
    {Role::kStateGates, "blk.{}.ssm_ba"},
    {Role::kStateDt, ""},
};

constexpr NameRule kSplitGgufNames[] = {
    {Role::kMlpIn, "blk.{}.post_attention_norm"}, {Role::kStateIn, "blk.{}.attn_qkv"},
    {Role::kStateZ, "blk.{}.attn_gate"},          {Role::kStateGates, "blk.{}.ssm_beta"},
    {Role::kStateDt, "blk.{}.ssm_alpha"},
};

}  // namespace qwen3_next_model

Architecture qwen3_next() {
  return {.type = "qwen3_next",
          .spec = qwen3_next_model::spec,
          .names = qwen3_next_model::kNames,
          .gguf_names = qwen3_next_model::kGgufNames,
          .norms_less_one = true};
}

Architecture qwen3_5() {
  return {.type = "qwen3_5_text",
          .spec = qwen3_next_model::dense_spec,
          .names = qwen3_next_model::kSplitNames,
          .gguf_names = qwen3_next_model::kSplitGgufNames,
          .norms_less_one = true};
}
Architecture qwen3_5_moe() {
  return {.type = "qwen3_5_moe_text",
          .spec = qwen3_next_model::moe_spec,
          .names = qwen3_next_model::kSplitNames,
          .gguf_names = qwen3_next_model::kSplitGgufNames,
          .norms_less_one = true};
}

}  // namespace freshet::models

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace lfm2_model {

// `ff`: the width of MLPs as the model has it.
ModelSpec base(Config& c, std::string_view name, const DecoderDefaults& defaults) {
  ModelSpec s = decoder_spec(c, name, defaults);
  const float eps = static_cast<float>(c.number({"norm_eps", "rms_norm_eps"}, 1e-5));
  s.final_norm->eps = eps;
  ShortConvSpec conv;
  conv.channels = s.hidden_size;
  conv.taps = c.size({"conv_L_cache"}, 3);
  conv.bias = c.flag({"conv_bias"}, false);
  const std::vector<bool> attends = attention_layers(c, s, {"full_attention"}, {"conv"});
  for (size_t i = 0; i < s.layers.size(); ++i) {
    LayerSpec& layer = s.layers[i];
    for (BranchSpec& branch : layer.branches) branch.norms.in->eps = eps;
    AttentionSpec& a = layer.attention();
    a.qk_norm = QkNorm::kHead;
    a.qk_norm_spec.eps = eps;
    if (!attends[i]) layer.branches.front().body = conv;
  }
  return s;
}

ModelSpec spec(Config& c) {
  ModelSpec s = base(c, "lfm2",
                     {.vocab = 65536,
                      .hidden = 2560,
                      .kv_heads = 8,
                      .ff = 12288,
                      .context = 128000,
                      .tied = true,
                      .eps = 1e-5,
                      .rope = {.theta = 1000000.0}});
  int ff = c.size({"block_ff_dim", "intermediate_size"}, 12288);
  if (c.flag({"block_auto_adjust_ff_dim"}, true)) {
    ff = 2 * ff / 3;
    if (c.has("block_ffn_dim_multiplier") || !c.has_null("block_ffn_dim_multiplier")) {
      const int multiple = c.size({"block_multiple_of"}, 256);
      ff = static_cast<int>(c.number({"block_ffn_dim_multiplier"}, 1.0) * ff);
      ff = (ff + multiple - 1) / multiple * multiple;
    }
  }
  for (LayerSpec& layer : s.layers) layer.mlp().ff = ff;
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kFinalNorm, "model.embedding_norm"},
    {Role::kAttentionIn, "model.layers.{}.operator_norm"},
    {Role::kMlpIn, "model.layers.{}.ffn_norm"},
    {Role::kOutput, "model.layers.{}.self_attn.out_proj"},
    {Role::kQueryNorm, "model.layers.{}.self_attn.q_layernorm"},
    {Role::kKeyNorm, "model.layers.{}.self_attn.k_layernorm"},
    {Role::kStateIn, "model.layers.{}.conv.in_proj"},
    {Role::kStateConv, "model.layers.{}.conv.conv"},
    {Role::kStateOut, "model.layers.{}.conv.out_proj"},
    {Role::kGate, "model.layers.{}.feed_forward.w1"},
    {Role::kUp, "model.layers.{}.feed_forward.w3"},
    {Role::kDown, "model.layers.{}.feed_forward.w2"},
    {Role::kRouter, "model.layers.{}.feed_forward.gate"},
    {Role::kRouterCorrection, "model.layers.{}.feed_forward.expert_bias"},
    {Role::kExpertGate, "model.layers.{}.feed_forward.experts.{e}.w1"},
    {Role::kExpertUp, "model.layers.{}.feed_forward.experts.{e}.w3"},
    {Role::kExpertDown, "model.layers.{}.feed_forward.experts.{e}.w2"},
};

constexpr NameRule kGgufNames[] = {
    {Role::kFinalNorm, "token_embd_norm"},
    {Role::kStateIn, "blk.{}.shortconv.in_proj"},
    {Role::kStateConv, "blk.{}.shortconv.conv"},
    {Role::kStateOut, "blk.{}.shortconv.out_proj"},
};

ModelSpec moe_spec(Config& c) {
  ModelSpec s = base(c, "lfm2_moe",
                     {.vocab = 65536,
                      .hidden = 2048,
                      .kv_heads = 8,
                      .ff = 7168,
                      .context = 128000,
                      .tied = true,
                      .eps = 1e-5,
                      .rope = {.theta = 1000000.0}});
  MoeSpec moe;
  moe.expert_ff = c.size({"moe_intermediate_size"}, 1792);
  moe.routing.score = ops::Routing::Score::kSigmoid;
  moe.routing.experts = c.size({"num_experts"}, 32);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 4);
  moe.routing.renormalize = c.flag({"norm_topk_prob"}, true);
  moe.routing.renormalize_eps = 1e-6f;
  moe.routing.scale = static_cast<float>(c.number({"routed_scaling_factor"}, 1.0));
  moe.router_correction = c.flag({"use_expert_bias"}, true);
  const int dense = c.count({"num_dense_layers", "first_k_dense_replace"}, 2);
  set_experts(s, moe, [&](int layer) { return layer >= dense; });
  return s;
}

}  // namespace lfm2_model

Architecture lfm2() {
  return {.type = "lfm2",
          .spec = lfm2_model::spec,
          .names = lfm2_model::kNames,
          .gguf_names = lfm2_model::kGgufNames};
}

Architecture lfm2_moe() {
  return {.type = "lfm2_moe",
          .spec = lfm2_model::moe_spec,
          .names = lfm2_model::kNames,
          .gguf_names = lfm2_model::kGgufNames};
}

}  // namespace freshet::models

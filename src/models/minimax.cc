#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace minimax_model {

// Branches read a normalised stream and add to a multiple of that.
void weigh(BranchSpec& branch, double stream, double own) {
  branch.normed_stream = true;
  branch.stream_scale = static_cast<float>(stream);
  branch.scale = static_cast<float>(own);
}

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "minimax",
                             {.kv_heads = 8,
                              .ff = 14336,
                              .context = int64_t{4096} * 32,
                              .eps = 1e-5,
                              .rope = {.theta = 1e6}});
  const AttentionSpec plain = s.layers.front().attention();
  LightningSpec lightning;
  lightning.heads = plain.heads;
  lightning.head_dim = plain.head_dim;
  lightning.activation = s.layers.front().mlp().activation;
  lightning.norm.eps = 1e-6f;
  MoeSpec moe;
  moe.expert_ff = s.layers.front().mlp().ff;
  moe.glu.activation = s.layers.front().mlp().activation;
  moe.routing.experts = c.size({"num_local_experts", "num_experts"}, 8);
  moe.routing.top_k = c.size({"num_experts_per_tok"}, 2);
  moe.routing.renormalize = true;
  set_experts(s, moe, [](int) { return true; });

  std::vector<bool> attends = attention_layers(c, s, {"full_attention"}, {"linear_attention"});
  const std::vector<float> types = c.floats({"attn_type_list"});  // 1: full attention
  const auto factor = [&](const char* key) { return c.number({key}, 1.0); };
  for (size_t i = 0; i < s.layers.size(); ++i) {
    if (!c.has("layer_types")) attends[i] = i < types.size() ? types[i] != 0.0f : i % 2 == 1;
    LayerSpec& layer = s.layers[i];
    const bool full = attends[i];
    if (!full) {
      // Deeper layers decay more slowly.
      const double depth = static_cast<double>(i) / (std::ssize(s.layers) - 1 + 1e-5);
      lightning.slope_scale = static_cast<float>(1.0 - depth + 1e-5);
      layer.branches.front().body = lightning;
    }
    weigh(layer.branches.front(),
          factor(full ? "full_attn_alpha_factor" : "linear_attn_alpha_factor"),
          factor(full ? "full_attn_beta_factor" : "linear_attn_beta_factor"));
    weigh(layer.branches.back(), factor("mlp_alpha_factor"), factor("mlp_beta_factor"));
  }
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kStateIn, "model.layers.{}.self_attn.qkv_proj"},
    {Role::kStateGates, "model.layers.{}.self_attn.output_gate"},
    {Role::kStateNorm, "model.layers.{}.self_attn.norm"},
    {Role::kStateOut, "model.layers.{}.self_attn.out_proj"},
    {Role::kRouter, "model.layers.{}.block_sparse_moe.gate"},
    {Role::kExpertGate, "model.layers.{}.block_sparse_moe.experts.{e}.w1"},
    {Role::kExpertUp, "model.layers.{}.block_sparse_moe.experts.{e}.w3"},
    {Role::kExpertDown, "model.layers.{}.block_sparse_moe.experts.{e}.w2"},
};

}  // namespace minimax_model

Architecture minimax() {
  return {.type = "minimax", .spec = minimax_model::spec, .names = minimax_model::kNames};
}

}  // namespace freshet::models

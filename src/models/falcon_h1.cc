#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace falcon_h1_model {

// Multipliers of inputs, keys and outputs go into scales that follow them.
ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "falcon_h1", {.vocab = 128000, .kv_heads = 8, .ff = 14336, .context = 8192, .eps = 1e-5});
  const auto number = [&](const char* key) { return static_cast<float>(c.number({key}, 1.0)); };
  s.embedding_scale = number("embedding_multiplier");
  s.logits_scale = number("lm_head_multiplier");
  const float attention_in = number("attention_in_multiplier"),
              ssm_in = number("ssm_in_multiplier");

  Mamba2Spec mamba = read_mamba2(c, s.hidden_size, s.final_norm->eps);
  if (!c.flag({"mamba_rms_norm"}, false)) mamba.norm.reset();
  mamba.norm_before_gate = c.flag({"mamba_norm_before_gate"}, true);
  const std::vector<float> parts = c.floats({"ssm_multipliers"});
  if (!parts.empty() && parts.size() != mamba.part_scale.size())
    c.fail(invalid_argument("the configuration's 'ssm_multipliers' must be 5 numbers"));
  for (size_t i = 0; i < mamba.part_scale.size(); ++i)
    mamba.part_scale[i] = ssm_in * (i < parts.size() ? parts[i] : 1.0f);
  const std::vector<float> mlp_scales = c.floats({"mlp_multipliers"});
  const bool attention_bias = c.flag({"attention_bias"}, false);
  if ((attention_bias && attention_in != 1.0f) || (mamba.proj_bias && ssm_in != 1.0f))
    c.fail(unsupported("falcon_h1 with biases behind multiplied inputs is not supported"));
  if (c.flag({"projectors_bias"}, false) != mamba.proj_bias)
    c.fail(unsupported("falcon_h1 with biases of some projections is not supported"));

  const BranchSpec mamba_branch{
      .norms = {.in = s.final_norm}, .body = mamba, .scale = number("ssm_out_multiplier")};
  for (LayerSpec& layer : s.layers) {
    AttentionSpec& a = layer.attention();
    a.scale *= attention_in * attention_in * number("key_multiplier");
    a.qkv_bias = a.out_bias = attention_bias;
    layer.branches.front().norms = {};
    layer.branches.front().scale = attention_in * number("attention_out_multiplier");
    layer.mlp().bias = c.flag({"mlp_bias"}, false);
    if (mlp_scales.size() == 2) {
      layer.mlp().gate_scale = mlp_scales[0];
      layer.branches.back().scale = mlp_scales[1];
    }
    layer.branches.insert(layer.branches.begin(), mamba_branch);
    layer.parallel = true;
    layer.together = 2;
  }
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kFinalNorm, "model.final_layernorm"},
    {Role::kMlpIn, "model.layers.{}.pre_ff_layernorm"},
    {Role::kGate, "model.layers.{}.feed_forward.gate_proj"},
    {Role::kUp, "model.layers.{}.feed_forward.up_proj"},
    {Role::kDown, "model.layers.{}.feed_forward.down_proj"},
};

}  // namespace falcon_h1_model

Architecture falcon_h1() {
  return {.type = "falcon_h1", .spec = falcon_h1_model::spec, .names = falcon_h1_model::kNames};
}

}  // namespace freshet::models

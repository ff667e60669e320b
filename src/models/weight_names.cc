#include "models/weight_names.h"

#include <fmt/format.h>

namespace freshet::models {
namespace {

constexpr NameRule kSafetensors[] = {
    {Role::kEmbedding, "model.embed_tokens"},
    {Role::kFinalNorm, "model.norm"},
    {Role::kHead, "lm_head"},
    {Role::kAttentionIn, "model.layers.{}.input_layernorm"},
    {Role::kMlpIn, "model.layers.{}.post_attention_layernorm"},
    {Role::kQuery, "model.layers.{}.self_attn.q_proj"},
    {Role::kKey, "model.layers.{}.self_attn.k_proj"},
    {Role::kValue, "model.layers.{}.self_attn.v_proj"},
    {Role::kQkv, "model.layers.{}.self_attn.qkv_proj"},
    {Role::kOutput, "model.layers.{}.self_attn.o_proj"},
    {Role::kQueryNorm, "model.layers.{}.self_attn.q_norm"},
    {Role::kKeyNorm, "model.layers.{}.self_attn.k_norm"},
    {Role::kSinks, "model.layers.{}.self_attn.sinks"},
    {Role::kQueryDown, "model.layers.{}.self_attn.q_a_proj"},
    {Role::kQueryLatentNorm, "model.layers.{}.self_attn.q_a_layernorm"},
    {Role::kQueryUp, "model.layers.{}.self_attn.q_b_proj"},
    {Role::kKvDown, "model.layers.{}.self_attn.kv_a_proj_with_mqa"},
    {Role::kKvLatentNorm, "model.layers.{}.self_attn.kv_a_layernorm"},
    {Role::kKvUp, "model.layers.{}.self_attn.kv_b_proj"},
    {Role::kStateIn, "model.layers.{}.mamba.in_proj"},
    {Role::kStateConv, "model.layers.{}.mamba.conv1d"},
    {Role::kStateX, "model.layers.{}.mamba.x_proj"},
    {Role::kStateDt, "model.layers.{}.mamba.dt_proj"},
    {Role::kStateDtBias, "model.layers.{}.mamba.dt_bias"},
    {Role::kStateA, "model.layers.{}.mamba.A_log"},
    {Role::kStateD, "model.layers.{}.mamba.D"},
    {Role::kStateNorm, "model.layers.{}.mamba.norm"},
    {Role::kStateDtNorm, "model.layers.{}.mamba.dt_layernorm"},
    {Role::kStateBNorm, "model.layers.{}.mamba.b_layernorm"},
    {Role::kStateCNorm, "model.layers.{}.mamba.c_layernorm"},
    {Role::kStateOut, "model.layers.{}.mamba.out_proj"},
    {Role::kGate, "model.layers.{}.mlp.gate_proj"},
    {Role::kUp, "model.layers.{}.mlp.up_proj"},
    {Role::kDown, "model.layers.{}.mlp.down_proj"},
    {Role::kGateUp, "model.layers.{}.mlp.gate_up_proj"},
    {Role::kRouter, "model.layers.{}.mlp.gate"},
    {Role::kRouterCorrection, "model.layers.{}.mlp.gate.e_score_correction_bias"},
    {Role::kExpertGate, "model.layers.{}.mlp.experts.{e}.gate_proj"},
    {Role::kExpertUp, "model.layers.{}.mlp.experts.{e}.up_proj"},
    {Role::kExpertDown, "model.layers.{}.mlp.experts.{e}.down_proj"},
    {Role::kExpertsGateUp, "model.layers.{}.mlp.experts.gate_up_proj"},
    {Role::kExpertsDown, "model.layers.{}.mlp.experts.down_proj"},
    {Role::kSharedGate, "model.layers.{}.mlp.shared_expert.gate_proj"},
    {Role::kSharedUp, "model.layers.{}.mlp.shared_expert.up_proj"},
    {Role::kSharedDown, "model.layers.{}.mlp.shared_expert.down_proj"},
    {Role::kSharedScale, "model.layers.{}.mlp.shared_expert_gate"},
};

constexpr NameRule kGguf[] = {
    {Role::kEmbedding, "token_embd"},
    {Role::kPositions, "position_embd"},
    {Role::kTokenTypes, "token_types"},
    {Role::kEmbeddedNorm, "token_embd_norm"},
    {Role::kFinalNorm, "output_norm"},
    {Role::kHead, "output"},
    {Role::kAttentionIn, "blk.{}.attn_norm"},
    {Role::kAttentionOut, "blk.{}.post_attention_norm"},
    {Role::kMlpIn, "blk.{}.ffn_norm"},
    {Role::kMlpOut, "blk.{}.post_ffw_norm"},
    {Role::kQuery, "blk.{}.attn_q"},
    {Role::kKey, "blk.{}.attn_k"},
    {Role::kValue, "blk.{}.attn_v"},
    {Role::kQkv, "blk.{}.attn_qkv"},
    {Role::kOutput, "blk.{}.attn_output"},
    {Role::kQueryNorm, "blk.{}.attn_q_norm"},
    {Role::kKeyNorm, "blk.{}.attn_k_norm"},
    {Role::kSinks, "blk.{}.attn_sinks"},
    {Role::kQueryDown, "blk.{}.attn_q_a"},
    {Role::kQueryLatentNorm, "blk.{}.attn_q_a_norm"},
    {Role::kQueryUp, "blk.{}.attn_q_b"},
    {Role::kKvDown, "blk.{}.attn_kv_a_mqa"},
    {Role::kKvLatentNorm, "blk.{}.attn_kv_a_norm"},
    {Role::kKvUp, "blk.{}.attn_kv_b"},
    {Role::kKeyUpTransposed, "blk.{}.attn_k_b"},
    {Role::kValueUp, "blk.{}.attn_v_b"},
    {Role::kStateIn, "blk.{}.ssm_in"},
    {Role::kStateConv, "blk.{}.ssm_conv1d"},
    {Role::kStateX, "blk.{}.ssm_x"},
    {Role::kStateDt, "blk.{}.ssm_dt"},
    {Role::kStateDtBias, "blk.{}.ssm_dt"},
    {Role::kStateA, "blk.{}.ssm_a"},
    {Role::kStateD, "blk.{}.ssm_d"},
    {Role::kStateNorm, "blk.{}.ssm_norm"},
    {Role::kStateDtNorm, "blk.{}.ssm_dt_norm"},
    {Role::kStateBNorm, "blk.{}.ssm_b_norm"},
    {Role::kStateCNorm, "blk.{}.ssm_c_norm"},
    {Role::kStateOut, "blk.{}.ssm_out"},
    {Role::kGate, "blk.{}.ffn_gate"},
    {Role::kUp, "blk.{}.ffn_up"},
    {Role::kDown, "blk.{}.ffn_down"},
    {Role::kGateUp, "blk.{}.ffn_up"},
    // Lists in the metadata.
    {Role::kXieluPositive, "xielu.alpha_p"},
    {Role::kXieluNegative, "xielu.alpha_n"},
    {Role::kXieluBeta, "xielu.beta"},
    {Role::kXieluEps, "xielu.eps"},
    {Role::kRouter, "blk.{}.ffn_gate_inp"},
    {Role::kRouterCorrection, "blk.{}.exp_probs_b"},
    {Role::kExpertGate, "blk.{}.ffn_gate.{e}"},
    {Role::kExpertUp, "blk.{}.ffn_up.{e}"},
    {Role::kExpertDown, "blk.{}.ffn_down.{e}"},
    {Role::kExpertsGate, "blk.{}.ffn_gate_exps"},
    {Role::kExpertsUp, "blk.{}.ffn_up_exps"},
    {Role::kExpertsDown, "blk.{}.ffn_down_exps"},
    {Role::kExpertsGateUp, "blk.{}.ffn_gate_up_exps"},
    {Role::kSharedGate, "blk.{}.ffn_gate_shexp"},
    {Role::kSharedUp, "blk.{}.ffn_up_shexp"},
    {Role::kSharedDown, "blk.{}.ffn_down_shexp"},
    {Role::kSharedScale, "blk.{}.ffn_gate_inp_shexp"},
};

void replace(std::string& text, std::string_view what, int number) {
  const size_t at = text.find(what);
  if (at != std::string::npos) text.replace(at, what.size(), std::to_string(number));
}

}  // namespace

WeightNames WeightNames::safetensors(std::span<const NameRule> differences) {
  WeightNames names;
  for (const NameRule& rule : kSafetensors)
    names.patterns_[static_cast<size_t>(rule.role)] = rule.pattern;
  for (const NameRule& rule : differences)
    names.patterns_[static_cast<size_t>(rule.role)] = rule.pattern;
  return names;
}

WeightNames WeightNames::gguf(std::span<const NameRule> differences) {
  WeightNames names;
  for (const NameRule& rule : kGguf) names.patterns_[static_cast<size_t>(rule.role)] = rule.pattern;
  for (const NameRule& rule : differences)
    names.patterns_[static_cast<size_t>(rule.role)] = rule.pattern;
  return names;
}

std::string WeightNames::stem(Role role, int layer, int expert, int choice) const {
  std::string_view pattern = patterns_[static_cast<size_t>(role)];
  for (; choice > 0; --choice) {
    const size_t end = pattern.find('|');
    if (end == std::string_view::npos) return {};
    pattern.remove_prefix(end + 1);
  }
  std::string name(pattern.substr(0, pattern.find('|')));
  replace(name, "{}", layer);
  replace(name, "{e}", expert);
  return name;
}

}  // namespace freshet::models

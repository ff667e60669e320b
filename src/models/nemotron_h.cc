#include <limits>

#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace nemotron_h_model {

// The kind of each layer, as a list or as a pattern of letters.
std::vector<std::string> kinds_of(Config& c) {
  std::vector<std::string> kinds = c.texts({"layers_block_type", "layer_types"});
  if (!kinds.empty()) return kinds;
  for (const char letter : c.text({"hybrid_override_pattern"}, "")) kinds.emplace_back(1, letter);
  return kinds;
}

// Each layer is one branch: Mamba-2, attention without positions, or an MLP.
ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(c, "nemotron_h",
                             {.vocab = 131072,
                              .kv_heads = 8,
                              .head_dim = 128,
                              .ff = 21504,
                              .context = 4096,
                              .eps = 1e-5,
                              .gated = false,
                              .activation = "relu2",
                              .rotary = false});
  LayerSpec both = s.layers.front();
  both.attention().qkv_bias = both.attention().out_bias = c.flag({"attention_bias"}, false);
  both.mlp().activation = c.activation({"mlp_hidden_act"}, "relu2");
  both.mlp().bias = c.flag({"mlp_bias"}, false);
  Mamba2Spec m;
  m.heads = c.size({"mamba_num_heads"}, 128);
  m.head_dim = c.size({"mamba_head_dim"}, 64);
  m.groups = c.size({"mamba_n_groups", "n_groups"}, 8);
  m.state = c.size({"ssm_state_size"}, 128);
  m.taps = c.size({"mamba_d_conv", "conv_kernel"}, 4);
  m.conv_bias = c.flag({"mamba_conv_bias", "use_conv_bias"}, true);
  m.proj_bias = c.flag({"mamba_proj_bias"}, false);
  m.norm = s.final_norm;
  m.norm_groups = m.groups;
  m.dt_min = static_cast<float>(c.number({"mamba_dt_min", "time_step_min"}, 0.001));
  m.dt_max = std::numeric_limits<float>::max();
  const std::vector<std::string> kinds = kinds_of(c);
  if (kinds.empty() || kinds.size() > 4096) {
    c.fail(invalid_argument("the configuration has no 'layers_block_type' of up to 4096 layers"));
    return s;
  }
  s.layers.clear();
  for (const std::string& kind : kinds) {
    LayerSpec& layer = s.layers.emplace_back();
    const bool mlp = kind == "-" || kind == "mlp";
    layer.branches = {both.branches[mlp ? 1 : 0]};
    if (kind == "M" || kind == "linear_attention" || kind == "mamba") {
      layer.branches.front().body = m;
    } else if (!mlp && kind != "*" && kind != "full_attention" && kind != "attention") {
      c.fail(unsupported("unsupported kind of layer '{}'{}", kind,
                         kind == "E" || kind == "moe" ? ": experts without gates" : ""));
      return s;
    }
  }
  return s;
}

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "backbone.embeddings"},
    {Role::kFinalNorm, "backbone.norm_f"},
    {Role::kAttentionIn, "backbone.layers.{}.norm"},
    {Role::kMlpIn, "backbone.layers.{}.norm"},
    {Role::kQuery, "backbone.layers.{}.mixer.q_proj"},
    {Role::kKey, "backbone.layers.{}.mixer.k_proj"},
    {Role::kValue, "backbone.layers.{}.mixer.v_proj"},
    {Role::kOutput, "backbone.layers.{}.mixer.o_proj"},
    {Role::kUp, "backbone.layers.{}.mixer.up_proj"},
    {Role::kDown, "backbone.layers.{}.mixer.down_proj"},
    {Role::kStateIn, "backbone.layers.{}.mixer.in_proj"},
    {Role::kStateConv, "backbone.layers.{}.mixer.conv1d"},
    {Role::kStateDtBias, "backbone.layers.{}.mixer.dt_bias"},
    {Role::kStateA, "backbone.layers.{}.mixer.A_log"},
    {Role::kStateD, "backbone.layers.{}.mixer.D"},
    {Role::kStateNorm, "backbone.layers.{}.mixer.norm"},
    {Role::kStateOut, "backbone.layers.{}.mixer.out_proj"},
};

constexpr NameRule kGgufNames[] = {{Role::kMlpIn, "blk.{}.attn_norm"}};

}  // namespace nemotron_h_model

Architecture nemotron_h() {
  return {.type = "nemotron_h",
          .spec = nemotron_h_model::spec,
          .names = nemotron_h_model::kNames,
          .gguf_names = nemotron_h_model::kGgufNames};
}

}  // namespace freshet::models

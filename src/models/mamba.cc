// Mamba, Falcon-Mamba and Mamba-2: layers of one branch each.
#include "models/architectures.h"
#include "models/decoder_config.h"
#include "models/state_config.h"

namespace freshet::models {
namespace mamba_model {

constexpr NameRule kNames[] = {
    {Role::kEmbedding, "backbone.embeddings"},
    {Role::kFinalNorm, "backbone.norm_f"},
    {Role::kAttentionIn, "backbone.layers.{}.norm"},
    {Role::kStateIn, "backbone.layers.{}.mixer.in_proj"},
    {Role::kStateConv, "backbone.layers.{}.mixer.conv1d"},
    {Role::kStateX, "backbone.layers.{}.mixer.x_proj"},
    {Role::kStateDt, "backbone.layers.{}.mixer.dt_proj"},
    {Role::kStateDtBias, "backbone.layers.{}.mixer.dt_bias"},
    {Role::kStateA, "backbone.layers.{}.mixer.A_log"},
    {Role::kStateD, "backbone.layers.{}.mixer.D"},
    {Role::kStateNorm, "backbone.layers.{}.mixer.norm"},
    {Role::kStateOut, "backbone.layers.{}.mixer.out_proj"},
};

ModelSpec base(Config& c, std::string_view name, const DecoderDefaults& defaults) {
  ModelSpec s = decoder_spec(c, name, defaults);
  for (LayerSpec& layer : s.layers) layer.branches.resize(1);
  return s;
}

ModelSpec first(Config& c, std::string_view name, DecoderDefaults defaults, bool inner_norm) {
  defaults.heads = 1;
  defaults.context = kAnyContext;
  defaults.rotary = false;
  ModelSpec s = base(c, name, defaults);
  MambaSpec m;
  m.inner = c.size({"intermediate_size"}, c.size({"expand"}, 2) * s.hidden_size);
  m.state = c.size({"state_size"}, 16);
  m.taps = c.size({"conv_kernel"}, 4);
  m.dt_rank = read_dt_rank(c, {"time_step_rank"}, s.hidden_size);
  m.conv_bias = c.flag({"use_conv_bias"}, true);
  m.proj_bias = c.flag({"use_bias"}, false);
  if (inner_norm) {
    const auto eps = static_cast<float>(c.number({"mixer_rms_eps"}, 1e-6));
    m.inner_norm = NormSpec{.eps = eps, .weight = false};
  }
  set_state_layers(s, m, [](int) { return false; });
  return s;
}

ModelSpec mamba_spec(Config& c) {
  return first(c, "mamba", {.vocab = 50280, .hidden = 768, .tied = true, .eps = 1e-5}, false);
}

ModelSpec falcon_spec(Config& c) {
  return first(c, "falcon_mamba", {.vocab = 50280, .hidden = 768, .tied = true, .eps = 1e-5}, true);
}

ModelSpec second_spec(Config& c) {
  ModelSpec s = base(c, "mamba2",
                     {.vocab = 32768,
                      .layers = 64,
                      .heads = 1,
                      .context = kAnyContext,
                      .eps = 1e-5,
                      .rotary = false});
  Mamba2Spec m;
  m.heads = c.size({"num_heads"}, 128);
  m.head_dim = c.size({"head_dim"}, 64);
  m.groups = c.size({"n_groups"}, 8);
  m.state = c.size({"state_size"}, 128);
  m.taps = c.size({"conv_kernel"}, 4);
  m.conv_bias = c.flag({"use_conv_bias"}, true);
  m.proj_bias = c.flag({"use_bias"}, false);
  m.norm = s.final_norm;
  m.norm_groups = m.groups;
  read_dt_limits(c, m);
  set_state_layers(s, m, [](int) { return false; });
  return s;
}

}  // namespace mamba_model

Architecture mamba() {
  return {.type = "mamba", .spec = mamba_model::mamba_spec, .names = mamba_model::kNames};
}
Architecture falcon_mamba() {
  return {.type = "falcon_mamba", .spec = mamba_model::falcon_spec, .names = mamba_model::kNames};
}
Architecture mamba2() {
  return {.type = "mamba2", .spec = mamba_model::second_spec, .names = mamba_model::kNames};
}

}  // namespace freshet::models

#include "models/state_config.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace freshet::models {

Mamba2Spec read_mamba2(Config& c, int hidden, float eps) {
  Mamba2Spec m;
  m.heads = c.size({"mamba_n_heads"}, 128);
  const int64_t expanded = int64_t{c.size({"mamba_expand"}, 2)} * hidden;
  const int inner = c.size({"mamba_d_ssm"}, static_cast<int>(std::min<int64_t>(expanded, 1 << 24)));
  const json::Value* const dim = c.find({"mamba_d_head"});
  const bool given = dim != nullptr && !dim->is_string();  // not "auto"
  m.head_dim = given ? c.size({"mamba_d_head"}, 64) : inner / m.heads;
  if (m.inner() != inner) {
    c.fail(invalid_argument("the configuration has {} Mamba heads of {}, but {} channels", m.heads,
                            m.head_dim, inner));
  }
  m.groups = c.size({"mamba_n_groups"}, 1);
  m.state = c.size({"mamba_d_state"}, 256);
  m.taps = c.size({"mamba_d_conv"}, 4);
  m.conv_bias = c.flag({"mamba_conv_bias"}, true);
  m.proj_bias = c.flag({"mamba_proj_bias"}, false);
  m.norm = NormSpec{.eps = eps};
  m.norm_groups = m.groups;
  read_dt_limits(c, m);
  return m;
}

void read_dt_limits(Config& c, Mamba2Spec& m) {
  const json::Value* const limits = c.find({"time_step_limit"});
  if (limits == nullptr || !limits->is_array() || limits->as_array().size() != 2) return;
  const json::Value& least = limits->as_array()[0];
  const json::Value& most = limits->as_array()[1];
  if (least.is_number()) m.dt_min = static_cast<float>(least.as_double());
  const bool ends = most.is_number() && std::isfinite(most.as_double());
  if (ends || m.dt_min > 0)
    m.dt_max = ends ? static_cast<float>(most.as_double()) : std::numeric_limits<float>::max();
}

int read_dt_rank(Config& c, Keys keys, int hidden) {
  const json::Value* const rank = c.find(keys);
  return rank == nullptr || rank->is_string() ? (hidden + 15) / 16 : c.size(keys, 1);
}

void set_state_layers(ModelSpec& spec, const BranchBody& body,
                      const std::function<bool(int)>& attends) {
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    if (!attends(static_cast<int>(i))) spec.layers[i].branches.front().body = body;
  }
}

}  // namespace freshet::models

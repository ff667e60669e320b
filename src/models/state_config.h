// Layers with states in configurations: what several architectures share.
#pragma once

#include <functional>

#include "layers/spec.h"
#include "models/config.h"

namespace freshet::models {

// A context that is as good as unlimited, for models without positions.
constexpr int64_t kAnyContext = int64_t{1} << 20;

// Mamba-2 under the keys that hybrid models use (`mamba_n_heads`, `mamba_d_state` ...), gated
// before a norm of `eps` in as many parts as there are groups.
Mamba2Spec read_mamba2(Config& config, int hidden, float eps);
// The limits of step sizes: `time_step_limit`, whose end may be infinite.
void read_dt_limits(Config& config, Mamba2Spec& mamba);

// Mamba with the low rank "auto": hidden / 16, rounded up.
int read_dt_rank(Config& config, Keys keys, int hidden);

// In layers for which `attends(layer)` does not hold, `body` takes the place of attention.
void set_state_layers(ModelSpec& spec, const BranchBody& body,
                      const std::function<bool(int)>& attends);

}  // namespace freshet::models

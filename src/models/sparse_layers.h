// Which layers of the Qwen MoE models have experts: every `decoder_sparse_step`-th that is not in
// `mlp_only_layers`.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "models/config.h"

namespace freshet::models {

inline std::function<bool(int)> sparse_layers(Config& config) {
  const int step = config.size({"decoder_sparse_step"}, 1);
  std::vector<float> dense = config.floats({"mlp_only_layers"});
  return [step, dense = std::move(dense)](int layer) {
    const bool listed =
        std::find(dense.begin(), dense.end(), static_cast<float>(layer)) != dense.end();
    return !listed && (layer + 1) % step == 0;
  };
}

}  // namespace freshet::models

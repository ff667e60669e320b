// PyramidKV (arXiv:2406.02069): SnapKV whose budgets fall from layer to layer, linearly or, as in
// PyramidInfer (arXiv:2405.12532), by a constant ratio.
#include <algorithm>
#include <cmath>

#include "kv_cache/retention/pooled.h"

namespace freshet::kv_cache {
namespace {

class PyramidKvPolicy final : public PooledWindowPolicy {
 public:
  using PooledWindowPolicy::PooledWindowPolicy;
  bool differs_by_layer() const override { return true; }
  int32_t budget(int layer, int layers) const override {
    const double mean = config().budget - config().window;
    double share = mean;
    if (config().decay > 0.0 && config().decay < 1.0) {
      const double r = config().decay;
      share = mean * layers * std::pow(r, layer) * (1.0 - r) / (1.0 - std::pow(r, layers));
    } else if (config().decay == 0.0 && layers > 1) {
      const double least = mean / config().beta, most = 2.0 * mean - least;
      share = most - layer * (most - least) / (layers - 1);
    }
    return config().window + std::max(config().sinks + 1, static_cast<int32_t>(share));
  }
};

}  // namespace

constinit const RetentionKind kPyramidKv = {
    "pyramidkv",
    "window kernel sinks interval beta decay",
    {.window = 16, .kernel = 13, .beta = 20.0},
    [](const RetentionConfig& c) { return Retention(std::make_shared<PyramidKvPolicy>(c)); }};

}  // namespace freshet::kv_cache

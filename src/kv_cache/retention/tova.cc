// TOVA (arXiv:2401.06104): keeps the keys with the largest weights in the last query, averaged over
// all heads of a layer, so that all heads keep the same tokens.
#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

class TovaPolicy final : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override { return {.interval = config().interval, .window = 1}; }
  void keep(const StoredKeys& keys, int, std::span<int32_t> kept) const override {
    std::vector<int64_t> sums(static_cast<size_t>(keys.slots));
    for (int h = 0; h < keys.kv_heads; ++h) {
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += keys.scores(h)[i];
    }
    keep_best(sums, config().sinks, 1, kept);
  }
};

}  // namespace

constinit const RetentionKind kTova = {
    "tova", "sinks interval", {.window = 1, .interval = 16}, [](const RetentionConfig& c) {
      return Retention(std::make_shared<TovaPolicy>(c));
    }};

}  // namespace freshet::kv_cache

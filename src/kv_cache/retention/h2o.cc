// H2O (arXiv:2306.14048): keeps the keys with the largest sums of attention weights so far, and the
// newest. Sums begin with the prompt's last queries.
#include <algorithm>

#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

class H2oPolicy final : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override {
    return {config().interval, false, config().window, true};
  }
  void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const override {
    const auto count = static_cast<int32_t>(kept.size());
    const int32_t recent =
        config().recent > 0 ? config().recent : std::max(1, (count - config().sinks) / 2);
    keep_best(keys.scores(head), config().sinks, recent, kept);
  }
};

}  // namespace

constinit const RetentionKind kH2o = {
    "h2o",
    "window recent sinks interval",
    {.window = 8, .interval = 64},
    [](const RetentionConfig& c) { return Retention(std::make_shared<H2oPolicy>(c)); }};

}  // namespace freshet::kv_cache

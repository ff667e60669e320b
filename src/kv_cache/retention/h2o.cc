// H2O (arXiv:2306.14048): keeps the keys with the largest sums of attention weights so far, and the
// newest. Sums begin with the prompt's last queries. MiKV (arXiv:2402.18096): the others stay in 4
// bits, and have their share of the weights.
#include <algorithm>

#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

class H2oPolicy final : public RetentionPolicy {
 public:
  H2oPolicy(const RetentionConfig& config, bool recodes)
      : RetentionPolicy(config), recodes_(recodes) {}
  RetentionRules rules() const override {
    return {.interval = config().interval,
            .window = config().window,
            .accumulates = true,
            .recodes = recodes_};
  }
  void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const override {
    const auto count = static_cast<int32_t>(kept.size());
    const int32_t recent =
        config().recent > 0 ? config().recent : std::max(1, (count - config().sinks) / 2);
    keep_best(keys.scores(head), config().sinks, recent, kept);
  }

 private:
  bool recodes_;
};

constexpr std::string_view kH2oKeys = "window recent sinks interval";
constexpr RetentionConfig kH2oDefaults = {.window = 8, .interval = 64};

}  // namespace

constinit const RetentionKind kH2o = {"h2o", kH2oKeys, kH2oDefaults, [](const RetentionConfig& c) {
                                        return Retention(std::make_shared<H2oPolicy>(c, false));
                                      }};
constinit const RetentionKind kMikv = {
    "mikv", kH2oKeys, kH2oDefaults,
    [](const RetentionConfig& c) { return Retention(std::make_shared<H2oPolicy>(c, true)); }};

}  // namespace freshet::kv_cache

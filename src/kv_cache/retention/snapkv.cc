// SnapKV (arXiv:2404.14469): at the end of the prompt, the keys that its last queries weigh most,
// pooled along the sequence, and these last tokens.
#include "kv_cache/retention/pooled.h"
#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

class SnapKvPolicy final : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override {
    return {config().interval, false, config().window, false};
  }
  void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const override {
    const auto before = static_cast<size_t>(keys.slots - config().window);
    std::vector<int64_t> pooled = sum_pooled(keys.scores(head).first(before), config().kernel);
    pooled.resize(static_cast<size_t>(keys.slots));
    keep_best(pooled, config().sinks, config().window, kept);
  }
};

}  // namespace

constinit const RetentionKind kSnapKv = {
    "snapkv",
    "window kernel sinks interval",
    {.window = 16, .kernel = 13},
    [](const RetentionConfig& c) { return Retention(std::make_shared<SnapKvPolicy>(c)); }};

}  // namespace freshet::kv_cache

// StreamingLLM (arXiv:2309.17453) with true positions: keeps the first tokens and the newest ones.
#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {
namespace {

class StreamingPolicy final : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override {
    return {.interval = config().interval, .in_prompt = true};
  }
  void keep(const StoredKeys& keys, int, std::span<int32_t> kept) const override {
    const auto count = static_cast<int32_t>(kept.size());
    for (int32_t i = 0; i < count; ++i) {
      kept[static_cast<size_t>(i)] = i < config().sinks ? i : keys.slots - count + i;
    }
  }
};

}  // namespace

constinit const RetentionKind kStreaming = {
    "streaming", "sinks interval", {.sinks = 4, .interval = 64}, [](const RetentionConfig& c) {
      return Retention(std::make_shared<StreamingPolicy>(c));
    }};

}  // namespace freshet::kv_cache

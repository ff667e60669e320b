// Pooling of scores along a sequence, and the policy that SnapKV and PyramidKV share (KV
// compression, retention.h). Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {

// out[i]: the sum of the `kernel` scores around i; slots outside count as 0. An average has the
// same order.
inline std::vector<int64_t> sum_pooled(std::span<const int64_t> scores, int32_t kernel) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> out(scores.size());
  const int64_t before = kernel / 2, after = kernel - 1 - before;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = std::max<int64_t>(0, i - before); j <= std::min(n - 1, i + after); ++j) {
      out[static_cast<size_t>(i)] += scores[static_cast<size_t>(j)];
    }
  }
  return out;
}

inline std::vector<int64_t> max_pooled(std::span<const int64_t> scores, int32_t kernel) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> out(scores.size());
  const int64_t before = kernel / 2, after = kernel - 1 - before;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = std::max<int64_t>(0, i - before), to = std::min(n - 1, i + after);
    out[static_cast<size_t>(i)] = *std::max_element(scores.begin() + from, scores.begin() + to + 1);
  }
  return out;
}

// Keeps what the last `window` queries weigh most, pooled, and these queries' own tokens.
class PooledWindowPolicy : public RetentionPolicy {
 public:
  using RetentionPolicy::RetentionPolicy;
  RetentionRules rules() const override {
    return {.interval = config().interval, .window = config().window};
  }
  void keep(const StoredKeys& keys, int head, std::span<int32_t> kept) const override {
    const auto before = static_cast<size_t>(keys.slots - config().window);
    std::vector<int64_t> pooled = sum_pooled(keys.scores(head).first(before), config().kernel);
    pooled.resize(static_cast<size_t>(keys.slots));
    keep_best(pooled, config().sinks, config().window, kept);
  }
};

}  // namespace freshet::kv_cache

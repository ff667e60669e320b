#include "scheduler/batching_policy.h"

#include <algorithm>
#include <limits>

namespace freshet::scheduler {
namespace {

class Continuous final : public BatchingPolicy {
 public:
  std::string_view name() const override { return "continuous"; }
  Grant grant(const QueueView&) const override {
    return {std::numeric_limits<int32_t>::max(), std::numeric_limits<int64_t>::max(), 0};
  }
};

class Static final : public BatchingPolicy {
 public:
  explicit Static(const BatchingOptions& options) : options_(options) {}
  std::string_view name() const override { return "static"; }
  Grant grant(const QueueView& queue) const override {
    if (queue.live_batches > 0) return {};
    const int64_t due = queue.oldest_arrival + options_.max_wait_us;
    const bool full = queue.waiting >= options_.max_batch_size ||
                      queue.waiting_tokens >= options_.max_tokens_per_batch;
    if (!full && queue.now < due) return {0, 0, due};
    return {options_.max_batch_size, options_.max_tokens_per_batch, 0};
  }

 private:
  BatchingOptions options_;
};

class Dynamic final : public BatchingPolicy {
 public:
  explicit Dynamic(const BatchingOptions& options) : options_(options) {}
  std::string_view name() const override { return "dynamic"; }
  Grant grant(const QueueView& queue) const override {
    if (queue.live_batches >= options_.instances) return {};
    const int64_t due = queue.oldest_arrival + options_.max_wait_us;
    int32_t size = std::min(queue.waiting, options_.max_batch_size);
    if (size < options_.max_batch_size && queue.now < due) {
      int32_t preferred = 0;
      for (const int32_t p : options_.preferred_batch_sizes) {
        if (p <= size) preferred = std::max(preferred, p);
      }
      if (preferred == 0) return {0, 0, due};
      size = preferred;
    }
    return {size, options_.max_tokens_per_batch, 0};
  }

 private:
  BatchingOptions options_;
};

}  // namespace

Result<std::unique_ptr<BatchingPolicy>> make_batching_policy(const BatchingOptions& options) {
  if (options.max_batch_size < 1)
    return invalid_argument("max_batch_size is {}: must be 1 or more", options.max_batch_size);
  if (options.max_wait_us < 0)
    return invalid_argument("max_wait_us is {}: must not be negative", options.max_wait_us);
  if (options.max_tokens_per_batch < 1) {
    return invalid_argument("max_tokens_per_batch is {}: must be 1 or more",
                            options.max_tokens_per_batch);
  }
  if (options.instances < 1)
    return invalid_argument("instances is {}: must be 1 or more", options.instances);
  for (const int32_t size : options.preferred_batch_sizes) {
    if (size < 1 || size > options.max_batch_size) {
      return invalid_argument("preferred batch size {}: must be 1 to max_batch_size ({})", size,
                              options.max_batch_size);
    }
  }
  switch (options.kind) {
    case BatchingKind::kStatic:
      return std::unique_ptr<BatchingPolicy>(new Static(options));
    case BatchingKind::kDynamic:
      return std::unique_ptr<BatchingPolicy>(new Dynamic(options));
    case BatchingKind::kContinuous:
      break;
  }
  return std::unique_ptr<BatchingPolicy>(new Continuous);
}

Result<BatchingKind> batching_by_name(std::string_view name) {
  if (name == "continuous") return BatchingKind::kContinuous;
  if (name == "static") return BatchingKind::kStatic;
  if (name == "dynamic") return BatchingKind::kDynamic;
  return invalid_argument("unknown batching policy '{}'; there are continuous, static and dynamic",
                          name);
}

}  // namespace freshet::scheduler

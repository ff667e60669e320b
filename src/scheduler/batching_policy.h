// When new requests may join the running ones.
//
// Continuous batching admits a request as soon as there is room. The other policies are there for
// comparison, and for services that want them. Static batching collects a full batch (or waits for
// a limited time) and runs it to its end. Dynamic batching forms batches as in a Triton
// configuration: preferred sizes, a queue delay, a number of instances. A policy only says how many
// requests may start; the queue decides which. Objects are immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::scheduler {

struct QueueView {
  int64_t now = 0;             // microseconds
  int64_t oldest_arrival = 0;  // of the waiting requests
  int32_t waiting = 0;         // requests that have not started; > 0
  int64_t waiting_tokens = 0;  // of their prompts
  int32_t live_batches = 0;    // admitted batches with a request that has not ended
};

// At most this many requests and prompt tokens may start (one request always may, if requests > 0).
struct Grant {
  int32_t requests = 0;
  int64_t tokens = 0;
  int64_t look_again =
      0;  // with requests == 0: when the answer may change without new input; 0: never
};

class BatchingPolicy {
 public:
  virtual ~BatchingPolicy() = default;
  virtual std::string_view name() const = 0;
  virtual Grant grant(const QueueView& queue) const = 0;
};

enum class BatchingKind : uint8_t { kContinuous, kStatic, kDynamic };
Result<BatchingKind> batching_by_name(std::string_view name);  // continuous, static, dynamic

struct BatchingOptions {
  BatchingKind kind = BatchingKind::kContinuous;
  int32_t max_batch_size = 32;
  int64_t max_wait_us = 50'000;  // Triton: max_queue_delay_microseconds
  int64_t max_tokens_per_batch = 4096;
  std::vector<int32_t> preferred_batch_sizes;
  int32_t instances = 1;  // batches that run at the same time
};

Result<std::unique_ptr<BatchingPolicy>> make_batching_policy(const BatchingOptions& options);

}  // namespace freshet::scheduler

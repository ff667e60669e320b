// When new requests may join what runs.
//
// Continuous batching lets a request in as soon as there is room. The others exist to be compared
// with it, and for services that want them: static batching collects a full batch (or waits a
// while) and runs it to its end; dynamic batching forms batches as a Triton configuration describes
// them: preferred sizes, a queue delay, a number of instances. A policy only says how many may
// enter; who they are is the queue's business. Objects are immutable.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::scheduler {

struct QueueView {
  int64_t now = 0;             // microseconds
  int64_t oldest_arrival = 0;  // of those that wait
  int32_t waiting = 0;         // requests that never ran; > 0
  int64_t waiting_tokens = 0;  // of their prompts
  int32_t live_batches = 0;    // admissions of which some request still lives
};

// At most so many requests and prompt tokens may enter (one always may, if requests > 0).
struct Grant {
  int32_t requests = 0;
  int64_t tokens = 0;
  int64_t look_again = 0;  // with requests == 0: when the answer may change by time alone; 0: never
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
  int32_t instances = 1;  // batches that run side by side
};

Result<std::unique_ptr<BatchingPolicy>> make_batching_policy(const BatchingOptions& options);

}  // namespace freshet::scheduler

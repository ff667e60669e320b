// A request from its arrival to its end: what it asked for, what it used, and its outputs.
//
// State of the step loop (step_loop.h) and of the request's own outputs; the step thread's alone,
// but for what outputs/request_output.h lets the thread pool do.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/outputs/request_output.h"
#include "engine/retention.h"
#include "engine/sparse.h"
#include "engine/tower_rows.h"
#include "freshet/engine.h"
#include "scheduler/scheduler.h"

namespace freshet::engine {

struct LiveRequest {
  uint64_t id = 0;
  Request request;
  uint64_t seed = 0;
  int max_tokens = 0;            // clipped to what the longest sequence leaves
  std::vector<int32_t> end_ids;  // ascending; each ends the output by itself
  Usage usage;
  std::vector<std::unique_ptr<RequestOutput>> outputs;
  kv_cache::Retention retention;  // nullptr: all keys are kept
  std::shared_ptr<const kv_cache::EvictionSchedule> eviction;
  bool started = false;                    // a step was scheduled for it
  bool over = false;                       // its outputs have all they asked for
  std::unique_ptr<LivePictures> pictures;  // nullptr: there are none
  kv_cache::SparseAttention sparse;
  std::vector<float> encoded;  // the encoder's output, if it was computed ahead of the first step
};

// What decides how a request is read, of the loop's options.
struct RequestDefaults {
  int max_model_len = 0;
  uint64_t seed = 0;         // requests without a seed draw theirs from this and their number
  std::vector<int32_t> eos;  // ids that end a text, ascending
  kv_cache::Retention retention = {};
  const KvCacheSpec* cache = nullptr;
  kv_cache::SparseAttention sparse = {};
};

// REQUIRES: find_error(request, ...) found none (request_check.h). `services` must outlive it.
std::unique_ptr<LiveRequest> make_live_request(uint64_t id, Request request,
                                               const RequestDefaults& defaults,
                                               const OutputServices& services);

// The scheduler's order for the request, which arrives at `now` (microseconds).
scheduler::NewRequest order_of(const LiveRequest& live, int64_t now);

// Fills in the usage that the scheduler counts, if it still knows the request.
void record_usage(LiveRequest& live, const scheduler::Scheduler& scheduler);

}  // namespace freshet::engine

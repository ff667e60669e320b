// Checks of a request (freshet/engine.h) against what an engine can serve. Pure.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/retention.h"
#include "freshet/engine.h"

namespace freshet::engine {

struct RequestLimits {
  int64_t vocab = 0;
  int max_model_len = 0;
  int max_num_seqs = 0;
  bool has_tokenizer = false;
  bool speculates = false;
  const KvCacheSpec* cache = nullptr;  // nullptr: keys of live sequences cannot be evicted here
  kv_cache::Retention retention = {};  // of requests that name none
};

// The first thing that is wrong with `request`.
std::optional<RequestError> find_error(const Request& request, const RequestLimits& limits);

}  // namespace freshet::engine

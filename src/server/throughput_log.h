// The line that the server prints from time to time while it has work, in vLLM's form:
//
//   Avg prompt throughput: 812.4 tokens/s, Avg generation throughput: 96.0 tokens/s, Running: 8
//   reqs, Waiting: 0 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 41.0%
//
// Rates are of the time since the previous call. Used by one thread at a time.
#pragma once

#include <optional>
#include <string>

#include "freshet/engine.h"

namespace freshet::server {

class ThroughputLog {
 public:
  // `seconds`: since the previous call, or since the start. nullopt if nothing happened and nothing
  // happens.
  std::optional<std::string> line(const EngineStats& now, double seconds);

 private:
  EngineStats before_;
};

}  // namespace freshet::server

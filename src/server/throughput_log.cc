#include "server/throughput_log.h"

#include <fmt/format.h>

namespace freshet::server {

std::optional<std::string> ThroughputLog::line(const EngineStats& now, double seconds) {
  const auto since = [&](auto member) {
    return static_cast<double>(now.*member - before_.*member);
  };
  const double prompt = since(&EngineStats::prompt_tokens);
  const double cached = since(&EngineStats::cached_tokens);
  const double computed = prompt - cached + since(&EngineStats::recomputed_tokens);
  const double generated = since(&EngineStats::generated_tokens);
  before_ = now;
  if (prompt == 0 && generated == 0 && now.running == 0 && now.waiting == 0) return std::nullopt;
  return fmt::format(
      "Avg prompt throughput: {:.1f} tokens/s, Avg generation throughput: {:.1f} tokens/s, "
      "Running: {} reqs, Waiting: {} reqs, KV cache usage: {:.1f}%, Prefix cache hit rate: {:.1f}%",
      computed / seconds, generated / seconds, now.running, now.waiting, 100.0 * now.kv_cache_usage,
      prompt > 0 ? 100.0 * cached / prompt : 0.0);
}

}  // namespace freshet::server

// The server's Prometheus metrics: vLLM's names, labels and buckets (so that its dashboards work),
// and Freshet's own with the prefix freshet:. Also the small JSON summary of /v1/metrics.
// Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "freshet/engine.h"
#include "server/prometheus.h"

namespace freshet::server {

using Clock = std::chrono::steady_clock;
inline double seconds_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

// The numbers of a finished request.
struct RequestRecord {
  Clock::time_point arrival, first_token, last_token, end;
  int prompt_tokens = 0;
  int cached_tokens = 0;
  int generation_tokens = 0;
  int longest_sample = 0;  // tokens of the longest of the n samples
  int max_tokens = 0;
  int n = 1;
  int preemptions = 0;
  double queue_s = 0.0;
  FinishReason finish = FinishReason::kStop;
};

class Metrics {
 public:
  // max_drafts: as Engine::max_drafts().
  Metrics(const std::string& model_name, int max_model_len, int max_drafts, const CacheInfo& cache,
          std::function<EngineStats()> stats);

  void time_to_first_token(double seconds) { ttft_.observe(seconds); }
  // A delta of `tokens` tokens arrived `seconds` after the previous one.
  void inter_token_latency(double seconds, int tokens);
  void finished(const RequestRecord& record);
  void http_request(const std::string& handler, const std::string& method, int status,
                    double seconds);
  void refused() { refused_.add(); }

  std::string expose() const { return registry_.expose(); }
  json::Value summary() const;  // total_requests, total_tokens, avg_latency_ms, ...

 private:
  void add_gauges(const CacheInfo& cache);
  void add_tiers();
  void add_pictures();
  void add_counters();
  void add_speculation(int max_drafts);
  void add_histograms(const CacheInfo& cache);
  std::function<double()> of(auto member) const;

  const std::vector<double> tokens_bounds_;
  std::function<EngineStats()> stats_;
  Registry registry_;
  Histogram &ttft_, &itl_, &tpot_, &e2e_, &queue_, &prefill_, &decode_, &inference_;
  Histogram &prompt_tokens_, &generation_tokens_, &longest_sample_, &max_tokens_, &n_,
      &prefill_computed_, &preemptions_;
  Histogram& http_seconds_;
  Counter& refused_;
  Counter requests_, latency_s_, tokens_, decode_s_;
};

}  // namespace freshet::server

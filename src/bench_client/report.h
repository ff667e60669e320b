// The results of a serving benchmark: numbers, vLLM's table and vLLM's JSON keys.
//
// Definitions follow vLLM's benchmark: only successful requests count; time per output token is
// (latency - TTFT) / (tokens - 1), omitted for answers of one token; inter-token latencies are
// pooled over all requests; goodput counts requests that meet every limit. Pure functions.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "bench_client/answer_reader.h"
#include "bench_client/stats.h"
#include "freshet/engine.h"

namespace freshet::bench_client {

struct Goodput {  // milliseconds; nullopt: no limit
  std::optional<double> ttft, tpot, e2el;
  bool any() const { return ttft || tpot || e2el; }
};
// "ttft:200", "tpot:50", "e2el:1000"
Result<Goodput> parse_goodput(const std::vector<std::string>& pairs);

// The metrics to report, by vLLM's names: ttft, tpot, itl, e2el, client_queue_time and
// e2el_including_client_queue.
struct Selection {
  std::vector<std::string> metrics = {"ttft", "tpot", "itl"};
  std::vector<double> percentiles = {99.0};
};
// "ttft,tpot,itl" and "50,99.9"
Result<Selection> parse_selection(const std::string& metrics, const std::string& percentiles);

struct SpecDecode {  // speculative decoding of the server, over the run
  double drafts = 0.0;
  double draft_tokens = 0.0;
  double accepted_tokens = 0.0;
  std::map<int, double> accepted_at;  // by position
};
// Reads the counters from a Prometheus text; nullopt if there are none.
std::optional<SpecDecode> parse_spec_decode(std::string_view metrics);
SpecDecode difference(const SpecDecode& after, const SpecDecode& before);
// Of requests of an engine in this process; nullopt: none drafted.
std::optional<SpecDecode> spec_decode_of(const Usage::Speculation& drafting);
// vLLM's keys: spec_decode_acceptance_rate (in percent), _acceptance_length and others.
void add_spec_decode(const SpecDecode& s, json::Object& o);

struct BenchRun {
  std::vector<Outcome> outcomes;
  double duration = 0.0;      // seconds
  double request_rate = 0.0;  // may be infinite
  double burstiness = 1.0;
  std::optional<int> max_concurrency;
  Goodput goodput;
  std::optional<SpecDecode> spec_decode;
};

// Values of one metric over a run, in seconds.
std::vector<double> values_of(const BenchRun& run, const std::string& metric);

struct Totals {
  int completed = 0;
  int failed = 0;
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  int good = 0;
  double peak_tokens_per_s = 0.0;  // in the best second of the run
  int peak_concurrency = 0;
};
Totals totals(const BenchRun& run);

// The table that vLLM prints.
std::string table(const BenchRun& run, const Selection& selection);
// vLLM's keys. `detailed`: also per-request lists.
json::Object result_json(const BenchRun& run, const Selection& selection, bool detailed);

}  // namespace freshet::bench_client

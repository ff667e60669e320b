#include "server/metrics.h"

#include <string_view>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

const std::vector<double> kTtft = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                   0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                   20,    40,    80,   160,  640,  2560};
const std::vector<double> kItl = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                  0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
const std::vector<double> kLatency = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                      30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
const std::vector<double> kN = {1, 2, 5, 10, 20};
const std::vector<double> kPreemptions = {0, 1, 2, 5, 10, 20, 50, 100};

// 1, 2, 5, 10, ... up to `most`.
std::vector<double> one_two_five(int64_t most) {
  std::vector<double> bounds;
  for (int64_t ten = 1; ten <= most; ten *= 10) {
    for (const int64_t digit : {1, 2, 5}) {
      if (digit * ten <= most) bounds.push_back(static_cast<double>(digit * ten));
    }
  }
  return bounds;
}

const char* name_of(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "abort";
    case FinishReason::kError:
      return "error";
    default:
      return "stop";
  }
}

constexpr const char* kBySource = "vllm:prompt_tokens_by_source_total";
constexpr const char* kSources =
    "Prompt tokens by where their keys and values came from. Those that were found and yet "
    "computed count twice.";

}  // namespace

Metrics::Metrics(const std::string& model_name, int max_model_len, int max_drafts,
                 const CacheInfo& cache, std::function<EngineStats()> stats)
    : tokens_bounds_(one_two_five(max_model_len)),
      stats_(std::move(stats)),
      registry_({{"model_name", model_name}, {"engine", "0"}}),
      ttft_(registry_.histogram("vllm:time_to_first_token_seconds",
                                "Time to first token in seconds.", kTtft)),
      itl_(registry_.histogram("vllm:inter_token_latency_seconds",
                               "Time between tokens in seconds.", kItl)),
      tpot_(registry_.histogram("vllm:request_time_per_output_token_seconds",
                                "Mean time per output token of a request, in seconds.", kItl)),
      e2e_(registry_.histogram("vllm:e2e_request_latency_seconds",
                               "Time from arrival to the last token.", kLatency)),
      queue_(registry_.histogram("vllm:request_queue_time_seconds",
                                 "Time a request waited to be admitted.", kLatency)),
      prefill_(registry_.histogram("vllm:request_prefill_time_seconds",
                                   "Time from admission to the first token.", kLatency)),
      decode_(registry_.histogram("vllm:request_decode_time_seconds",
                                  "Time from the first token to the last.", kLatency)),
      inference_(registry_.histogram("vllm:request_inference_time_seconds",
                                     "Time from admission to the last token.", kLatency)),
      prompt_tokens_(registry_.histogram("vllm:request_prompt_tokens",
                                         "Prompt tokens of a request.", tokens_bounds_)),
      generation_tokens_(registry_.histogram("vllm:request_generation_tokens",
                                             "Generated tokens of a request.", tokens_bounds_)),
      longest_sample_(registry_.histogram("vllm:request_max_num_generation_tokens",
                                          "Generated tokens of a request's longest sample.",
                                          tokens_bounds_)),
      max_tokens_(registry_.histogram("vllm:request_params_max_tokens", "max_tokens of a request.",
                                      tokens_bounds_)),
      n_(registry_.histogram("vllm:request_params_n", "n of a request.", kN)),
      prefill_computed_(registry_.histogram(
          "vllm:request_prefill_kv_computed_tokens",
          "Prompt tokens computed rather than found in the cache.", tokens_bounds_)),
      preemptions_(registry_.histogram("vllm:request_num_preemptions", "Preemptions of a request.",
                                       kPreemptions)),
      http_seconds_(registry_.histogram("http_request_duration_seconds",
                                        "Time to answer an HTTP request.", kTtft)),
      refused_(registry_.counter("freshet:requests_refused_total",
                                 "Requests refused because a queue was full.")) {
  add_gauges(cache);
  if (cache.tiers) add_tiers();
  add_counters();
  add_pictures();
  if (max_drafts > 0) add_speculation(max_drafts);
  add_histograms(cache);
}

std::function<double()> Metrics::of(auto member) const {
  return [this, member] { return static_cast<double>(stats_().*member); };
}

void Metrics::add_gauges(const CacheInfo& cache) {
  registry_.gauge("vllm:num_requests_running", "Requests in the running batch.",
                  of(&EngineStats::running));
  registry_.gauge("vllm:num_requests_waiting", "Requests waiting to be admitted.",
                  of(&EngineStats::waiting));
  const char* by_reason = "vllm:num_requests_waiting_by_reason";
  const char* reasons =
      "Requests waiting to be admitted, for want of room (capacity) or because the batching policy "
      "keeps them out (deferred).";
  registry_.gauge(by_reason, reasons,
                  [this] {
                    const EngineStats s = stats_();
                    return static_cast<double>(s.waiting - s.deferred);
                  },
                  {{"reason", "capacity"}});
  registry_.gauge(by_reason, reasons, of(&EngineStats::deferred), {{"reason", "deferred"}});
  registry_.gauge("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.",
                  of(&EngineStats::kv_cache_usage));
  for (const char* state : {"awake", "weights_offloaded", "discard_all"}) {
    const double value = std::string_view(state) == "awake" ? 1.0 : 0.0;
    registry_.gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.",
                    [value] { return value; }, {{"sleep_state", state}});
  }
  registry_.info("vllm:cache_config_info", "How the KV cache was laid out.",
                 {{"engine", "0"},
                  {"block_size", std::to_string(cache.block_tokens)},
                  {"cache_dtype", cache.type},
                  {"enable_prefix_caching", cache.prefix_caching ? "True" : "False"},
                  {"gpu_memory_utilization", fmt::format("{}", cache.gpu_memory_utilization)},
                  {"kv_cache_memory_bytes", std::to_string(cache.bytes)},
                  {"kv_cache_size_tokens", std::to_string(cache.tokens)},
                  {"num_gpu_blocks", std::to_string(cache.blocks)},
                  {"sliding_window",
                   cache.sliding_window > 0 ? std::to_string(cache.sliding_window) : "None"}});
}

void Metrics::add_counters() {
  registry_.counter_from("vllm:num_preemptions_total", "Preemptions.",
                         of(&EngineStats::preemptions));
  registry_.counter_from("freshet:kv_evictions_total",
                         "Evictions of keys and values of live sequences.",
                         of(&EngineStats::kv_evictions));
  registry_.counter_from("vllm:prompt_tokens_total", "Prompt tokens processed.",
                         of(&EngineStats::prompt_tokens));
  registry_.counter_from(
      kBySource, kSources,
      [this] {
        const EngineStats s = stats_();
        return static_cast<double>(s.prompt_tokens - s.cached_tokens - s.tiers.hits);
      },
      {{"source", "local_compute"}});
  registry_.counter_from(kBySource, kSources,
                         [this] {
                           const EngineStats s = stats_();
                           return static_cast<double>(s.cached_tokens + s.recomputed_tokens);
                         },
                         {{"source", "local_cache_hit"}});
  registry_.counter_from("vllm:prompt_tokens_recomputed_total",
                         "Last tokens of prompts that were cached whole: computed all the same.",
                         of(&EngineStats::recomputed_tokens));
  registry_.counter_from("vllm:generation_tokens_total", "Tokens generated.",
                         of(&EngineStats::generated_tokens));
  registry_.counter_from("vllm:prefix_cache_queries_total",
                         "Prompt tokens looked up in the prefix cache.",
                         of(&EngineStats::prompt_tokens));
  registry_.counter_from("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",
                         of(&EngineStats::cached_tokens));
  registry_.counter_from("vllm:prompt_tokens_cached_total",
                         "Prompt tokens found in the prefix cache.",
                         of(&EngineStats::cached_tokens));
  registry_.counter_from("freshet:steps_total", "Engine steps.", of(&EngineStats::steps));
}

// Of models that read pictures or sound, and of encoders; the first two as vLLM names them.
void Metrics::add_pictures() {
  using P = EngineStats::Pictures;
  registry_.counter_from("vllm:mm_cache_queries_total",
                         "Pictures and sounds looked up in the caches of encoders' outputs.",
                         [this] {
                           const EngineStats s = stats_();
                           const P p = s.pictures;
                           return static_cast<double>(p.computed + p.cached + s.encoder.sounds);
                         });
  registry_.counter_from("vllm:mm_cache_hits_total", "Pictures and sounds found in these caches.",
                         [this] {
                           const EngineStats s = stats_();
                           return static_cast<double>(s.pictures.cached + s.encoder.sounds_cached);
                         });
  registry_.counter_from("freshet:encoder_cache_queries_total",
                         "Requests whose encoder's output was looked up in the KV cache.",
                         [this] { return static_cast<double>(stats_().encoder.queries); });
  registry_.counter_from("freshet:encoder_cache_hits_total",
                         "Of those, the ones whose output was there.",
                         [this] { return static_cast<double>(stats_().encoder.hits); });
  registry_.counter_from("freshet:picture_seconds_total", "Seconds that the vision tower computed.",
                         [this] { return stats_().pictures.seconds; });
  registry_.gauge("freshet:picture_cache_bytes", "Bytes of the vision tower's output in its cache.",
                  [this] { return static_cast<double>(stats_().pictures.cache_bytes); });
}

// As vLLM names them.
void Metrics::add_tiers() {
  using T = EngineStats::Tiers;
  const auto tier = [this](auto member) {
    return [this, member] { return static_cast<double>(stats_().tiers.*member); };
  };
  registry_.counter_from("vllm:external_prefix_cache_queries_total",
                         "Prompt tokens looked up in the tiers below the KV cache.",
                         tier(&T::queries));
  registry_.counter_from("vllm:external_prefix_cache_hits_total",
                         "Prompt tokens loaded from the tiers below the KV cache.", tier(&T::hits));
  registry_.counter_from(kBySource, kSources, tier(&T::hits), {{"source", "external_kv_transfer"}});
  registry_.counter_from("vllm:kv_offload_store_bytes_total",
                         "Bytes copied from the KV cache to the host tier.", tier(&T::store_bytes));
  registry_.counter_from("vllm:kv_offload_load_bytes_total",
                         "Bytes loaded into the KV cache from its tiers.", tier(&T::load_bytes));
  registry_.counter_from("vllm:kv_offload_store_time_total", "Seconds of these copies.",
                         tier(&T::store_seconds));
  registry_.counter_from("vllm:kv_offload_load_time_total",
                         "Seconds of loads, from order to end; loads that overlap count each.",
                         tier(&T::load_seconds));
  registry_.counter_from("vllm:kv_offload_stores_skipped_total",
                         "Blocks that were not stored, for lack of room or bandwidth.",
                         tier(&T::stores_skipped));
  registry_.gauge("vllm:kv_offload_cpu_cache_usage_perc", "Share of the host tier in use, 0 to 1.",
                  tier(&T::host_usage));
  registry_.counter_from("freshet:kv_offload_load_failures_total",
                         "Blocks of the disk tier that were not intact; they are computed again.",
                         tier(&T::load_failures));
  registry_.counter_from("freshet:kv_offload_swapped_blocks_total",
                         "Blocks stored because their sequence was preempted.", tier(&T::swapped));
  registry_.gauge("freshet:num_requests_loading", "Sequences whose prefixes are being loaded.",
                  tier(&T::loading));
  registry_.gauge("freshet:kv_offload_disk_bytes", "Bytes of the files of the disk tier.",
                  tier(&T::disk_bytes));
  registry_.gauge("freshet:kv_offload_disk_blocks", "Blocks in the disk tier.",
                  tier(&T::disk_blocks));
}

void Metrics::add_speculation(int max_drafts) {
  const auto count = [this](auto member) {
    return [this, member] { return static_cast<double>(stats_().speculation.*member); };
  };
  using S = EngineStats::Speculation;
  registry_.counter_from("vllm:spec_decode_num_drafts_total", "Steps of a sequence with drafts.",
                         count(&S::drafts));
  registry_.counter_from("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens.",
                         count(&S::draft_tokens));
  registry_.counter_from("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens.",
                         count(&S::accepted_tokens));
  registry_.gauge("freshet:spec_decode_gain",
                  "Speed of decoding compared with plain steps, as measured; 0: not known yet.",
                  [this] { return stats_().speculation.gain(); });
  registry_.counter_from("freshet:spec_decode_draft_seconds_total", "Time spent on drafting.",
                         count(&S::draft_seconds));
  for (int i = 0; i < max_drafts; ++i) {
    registry_.counter_from("vllm:spec_decode_num_accepted_tokens_per_pos_total",
                           "Accepted draft tokens by their place in the draft.",
                           [this, i] {
                             const auto accepted = stats_().speculation.accepted_per_position;
                             const auto at = static_cast<size_t>(i);
                             return at < accepted.size() ? static_cast<double>(accepted[at]) : 0.0;
                           },
                           {{"position", std::to_string(i)}});
  }
}

void Metrics::add_histograms(const CacheInfo& cache) {
  const auto snapshot = [](const auto& counts, double sum) {
    Histogram::Snapshot h;
    uint64_t total = 0;
    for (const int64_t n : counts) h.cumulative.push_back(total += static_cast<uint64_t>(n));
    h.sum = sum;
    return h;
  };
  const auto& tokens = EngineStats::kStepTokens;
  registry_.histogram_from("vllm:iteration_tokens_total",
                           "Tokens of a step: of prompts, computed, and generated.",
                           {tokens.begin(), tokens.end()}, [this, snapshot] {
                             const EngineStats s = stats_();
                             return snapshot(s.steps_by_tokens, static_cast<double>(s.step_tokens));
                           });
  if (!cache.timed) return;
  const auto& seconds = EngineStats::kDurations;
  const auto durations = [&](const char* name, const char* help, auto member) {
    registry_.histogram_from(name, help, {seconds.begin(), seconds.end()},
                             [this, snapshot, member] {
                               const EngineStats::Durations d = stats_().*member;
                               return snapshot(d.counts, d.sum);
                             });
  };
  durations("vllm:kv_block_lifetime_seconds",
            "From taking a cache block to its eviction, of a sample.",
            &EngineStats::block_lifetime);
  durations("vllm:kv_block_idle_before_evict_seconds",
            "From the last use of a cache block to its eviction, of a sample.",
            &EngineStats::block_idle);
  durations("vllm:kv_block_reuse_gap_seconds",
            "Between the last uses of a cache block that was evicted, of a sample.",
            &EngineStats::block_reuse_gap);
}

void Metrics::inter_token_latency(double seconds, int tokens) {
  if (tokens > 0) itl_.observe(seconds / tokens, static_cast<uint64_t>(tokens));
}

void Metrics::finished(const RequestRecord& r) {
  registry_
      .counter("vllm:request_success_total", "Finished requests.",
               {{"finished_reason", name_of(r.finish)}})
      .add();
  const double latency = seconds_between(r.arrival, r.end);
  e2e_.observe(latency);
  prompt_tokens_.observe(r.prompt_tokens);
  prefill_computed_.observe(r.prompt_tokens - r.cached_tokens);
  generation_tokens_.observe(r.generation_tokens);
  longest_sample_.observe(r.longest_sample);
  max_tokens_.observe(r.max_tokens);
  n_.observe(r.n);
  preemptions_.observe(r.preemptions);
  queue_.observe(r.queue_s);
  requests_.add();
  latency_s_.add(latency);
  tokens_.add(r.generation_tokens);
  if (r.generation_tokens == 0) return;
  const double decode = seconds_between(r.first_token, r.last_token);
  prefill_.observe(seconds_between(r.arrival, r.first_token) - r.queue_s);
  decode_.observe(decode);
  inference_.observe(seconds_between(r.arrival, r.last_token) - r.queue_s);
  decode_s_.add(latency);
  if (r.generation_tokens > r.n) tpot_.observe(decode * r.n / (r.generation_tokens - r.n));
}

void Metrics::http_request(const std::string& handler, const std::string& method, int status,
                           double seconds) {
  registry_
      .counter("http_requests_total", "HTTP requests answered.",
               {{"handler", handler}, {"method", method}, {"status", std::to_string(status)}})
      .add();
  http_seconds_.observe(seconds);
}

json::Value Metrics::summary() const {
  const double requests = requests_.value();
  const EngineStats stats = stats_();
  json::Object o;
  o["total_requests"] = static_cast<int64_t>(requests);
  o["total_tokens"] = static_cast<int64_t>(tokens_.value());
  o["avg_latency_ms"] = requests > 0 ? 1000.0 * latency_s_.value() / requests : 0.0;
  o["avg_tokens_per_second"] = decode_s_.value() > 0 ? tokens_.value() / decode_s_.value() : 0.0;
  o["avg_batch_size"] = stats.steps > 0 ? static_cast<double>(stats.generated_tokens) /
                                              static_cast<double>(stats.steps)
                                        : 0.0;
  return o;
}

}  // namespace freshet::server

#include "bench_client/report.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

namespace freshet::bench_client {
namespace {

struct MetricName {
  const char* key;
  const char* name;
  const char* heading;
};
constexpr MetricName kMetrics[] = {
    {"ttft", "TTFT", "Time to First Token"},
    {"tpot", "TPOT", "Time per Output Token (excl. 1st token)"},
    {"itl", "ITL", "Inter-token Latency"},
    {"e2el", "E2EL", "End-to-end Latency"},
    {"client_queue_time", "Client Queue Time", "Client-side Queueing"},
    {"e2el_including_client_queue", "E2EL incl. Client Queue",
     "Queue-inclusive End-to-end Latency"},
};

std::optional<double> number(std::string_view s) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  if (error != std::errc() || end != s.data() + s.size() || !std::isfinite(value))
    return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    parts.push_back(list.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

// 99.0 -> "99", 99.9 -> "99.9"
std::string percent_word(double p) {
  return fmt::format("{:g}", p);
}

bool selected(const Selection& selection, const char* key) {
  const auto& m = selection.metrics;
  return std::find(m.begin(), m.end(), key) != m.end();
}

double tpot_of(const Outcome& o) {
  return o.output_tokens > 1 ? (o.latency - o.ttft) / (o.output_tokens - 1) : 0.0;
}

bool is_good(const Outcome& o, const Goodput& g) {
  const auto kept = [](const std::optional<double>& limit_ms, double seconds) {
    return !limit_ms || seconds <= *limit_ms / 1e3;
  };
  return kept(g.ttft, o.ttft) && kept(g.tpot, tpot_of(o)) && kept(g.e2el, o.latency);
}

void find_peaks(const BenchRun& run, Totals& t) {
  double first = INFINITY;
  double last = 0.0;
  for (const Outcome& o : run.outcomes) {
    if (!o.success) continue;
    first = std::min(first, o.start);
    last = std::max(last, o.start + o.latency);
  }
  if (t.completed == 0) return;
  std::vector<double> tokens(static_cast<size_t>(std::ceil(last - first)) + 1, 0.0);
  std::vector<std::pair<double, int>> events;  // at equal times, ends sort before starts
  for (const Outcome& o : run.outcomes) {
    if (!o.success) continue;
    events.emplace_back(o.start, 1);
    events.emplace_back(o.start + o.latency, -1);
    double at = o.start + o.ttft - first;
    const auto count = [&] { ++tokens[std::min(static_cast<size_t>(at), tokens.size() - 1)]; };
    count();
    for (const double gap : o.itl) {
      at += gap;
      count();
    }
  }
  std::sort(events.begin(), events.end());
  int now = 0;
  for (const auto& [time, change] : events)
    t.peak_concurrency = std::max(t.peak_concurrency, now += change);
  t.peak_tokens_per_s = *std::max_element(tokens.begin(), tokens.end());
}

std::string label_of(std::string_view labels, std::string_view name) {
  const size_t at = labels.find(fmt::format("{}=\"", name));
  if (at == std::string_view::npos) return {};
  const size_t begin = at + name.size() + 2;
  return std::string(labels.substr(begin, labels.find('"', begin) - begin));
}

json::Array numbers(const BenchRun& run, double (*value)(const Outcome&)) {
  json::Array out;
  for (const Outcome& o : run.outcomes) out.emplace_back(value(o));
  return out;
}

void add_details(const BenchRun& run, json::Object& o) {
  json::Array inputs, outputs, itls, texts, errors;
  for (const Outcome& r : run.outcomes) {
    inputs.emplace_back(r.input_tokens);
    outputs.emplace_back(r.success ? r.output_tokens : 0);
    json::Array gaps;
    for (const double gap : r.itl) gaps.emplace_back(gap);
    itls.emplace_back(std::move(gaps));
    texts.emplace_back(r.text);
    errors.emplace_back(r.error);
  }
  o["input_lens"] = std::move(inputs);
  o["output_lens"] = std::move(outputs);
  o["ttfts"] = numbers(run, [](const Outcome& r) { return r.ttft; });
  o["itls"] = std::move(itls);
  o["latencies"] = numbers(run, [](const Outcome& r) { return r.latency; });
  o["start_times"] = numbers(run, [](const Outcome& r) { return r.start; });
  o["queue_times"] = numbers(run, [](const Outcome& r) { return r.queue_time(); });
  o["generated_texts"] = std::move(texts);
  o["errors"] = std::move(errors);
}

}  // namespace

void add_spec_decode(const SpecDecode& s, json::Object& o) {
  if (s.draft_tokens <= 0.0 || s.drafts <= 0.0) return;
  o["spec_decode_acceptance_rate"] = 100.0 * s.accepted_tokens / s.draft_tokens;
  o["spec_decode_acceptance_length"] = 1.0 + s.accepted_tokens / s.drafts;
  o["spec_decode_num_drafts"] = static_cast<int64_t>(s.drafts);
  o["spec_decode_draft_tokens"] = static_cast<int64_t>(s.draft_tokens);
  o["spec_decode_accepted_tokens"] = static_cast<int64_t>(s.accepted_tokens);
  json::Array rates;
  for (const auto& [position, accepted] : s.accepted_at) rates.emplace_back(accepted / s.drafts);
  o["spec_decode_per_position_acceptance_rates"] = std::move(rates);
}

std::optional<SpecDecode> spec_decode_of(const Usage::Speculation& drafting) {
  if (drafting.steps == 0) return std::nullopt;
  SpecDecode s;
  s.drafts = drafting.steps;
  s.draft_tokens = drafting.drafted_tokens;
  s.accepted_tokens = drafting.accepted_tokens;
  int left = 0;  // steps that accepted more than i drafts
  for (size_t i = drafting.accepted.size(); i-- > 1;) {
    left += drafting.accepted[i];
    s.accepted_at[static_cast<int>(i) - 1] = left;
  }
  return s;
}

Result<Goodput> parse_goodput(const std::vector<std::string>& pairs) {
  Goodput goodput;
  for (const std::string& pair : pairs) {
    const size_t colon = std::min(pair.find(':'), pair.size());
    const std::string name = pair.substr(0, colon);
    const auto value = colon < pair.size() ? number(pair.substr(colon + 1)) : std::nullopt;
    if (!value || *value < 0.0)
      return invalid_argument("--goodput {}: write NAME:MILLISECONDS, as in ttft:200", pair);
    if (name == "ttft") {
      goodput.ttft = value;
    } else if (name == "tpot") {
      goodput.tpot = value;
    } else if (name == "e2el") {
      goodput.e2el = value;
    } else {
      return invalid_argument("--goodput {}: limits are ttft, tpot and e2el", pair);
    }
  }
  return goodput;
}

Result<Selection> parse_selection(const std::string& metrics, const std::string& percentiles) {
  Selection s;
  s.metrics = split(metrics);
  for (const std::string& m : s.metrics) {
    const auto known = [&](const MetricName& k) { return m == k.key; };
    if (std::none_of(std::begin(kMetrics), std::end(kMetrics), known)) {
      return invalid_argument(
          "--percentile-metrics {}: must be ttft, tpot, itl, e2el, client_queue_time or "
          "e2el_including_client_queue",
          m);
    }
  }
  s.percentiles.clear();
  for (const std::string& p : split(percentiles)) {
    const auto value = number(p);
    if (!value || *value < 0.0 || *value > 100.0)
      return invalid_argument("--metric-percentiles {}: must be numbers from 0 to 100", p);
    s.percentiles.push_back(*value);
  }
  return s;
}

std::optional<SpecDecode> parse_spec_decode(std::string_view metrics) {
  std::optional<SpecDecode> found;
  while (!metrics.empty()) {
    const size_t end = std::min(metrics.find('\n'), metrics.size());
    const std::string_view line = metrics.substr(0, end);
    metrics.remove_prefix(std::min(end + 1, metrics.size()));
    constexpr std::string_view kPrefix = "vllm:spec_decode_";
    const size_t space = line.rfind(' ');
    if (!line.starts_with(kPrefix) || space == std::string_view::npos) continue;
    const size_t brace = std::min(line.find('{'), space);
    const std::string_view name = line.substr(kPrefix.size(), brace - kPrefix.size());
    const auto value = number(line.substr(space + 1));
    if (!value) continue;
    SpecDecode& s = found ? *found : found.emplace();
    if (name == "num_drafts_total") s.drafts += *value;
    if (name == "num_draft_tokens_total") s.draft_tokens += *value;
    if (name == "num_accepted_tokens_total") s.accepted_tokens += *value;
    if (name == "num_accepted_tokens_per_pos_total") {
      const auto position = number(label_of(line.substr(brace, space - brace), "position"));
      if (position && *position >= 0 && *position < 1024)
        s.accepted_at[static_cast<int>(*position)] += *value;
    }
  }
  return found;
}

SpecDecode difference(const SpecDecode& after, const SpecDecode& before) {
  SpecDecode d = after;
  d.drafts -= before.drafts;
  d.draft_tokens -= before.draft_tokens;
  d.accepted_tokens -= before.accepted_tokens;
  for (const auto& [position, value] : before.accepted_at) d.accepted_at[position] -= value;
  return d;
}

std::vector<double> values_of(const BenchRun& run, const std::string& metric) {
  std::vector<double> values;
  for (const Outcome& o : run.outcomes) {
    if (!o.success) continue;
    if (metric == "ttft") values.push_back(o.ttft);
    if (metric == "tpot" && o.output_tokens > 1) values.push_back(tpot_of(o));
    if (metric == "itl") values.insert(values.end(), o.itl.begin(), o.itl.end());
    if (metric == "e2el") values.push_back(o.latency);
    if (metric == "client_queue_time") values.push_back(o.queue_time());
    if (metric == "e2el_including_client_queue") values.push_back(o.latency + o.queue_time());
  }
  return values;
}

Totals totals(const BenchRun& run) {
  Totals t;
  for (const Outcome& o : run.outcomes) {
    if (!o.success) {
      ++t.failed;
      continue;
    }
    ++t.completed;
    t.input_tokens += o.input_tokens;
    t.output_tokens += o.output_tokens;
    if (is_good(o, run.goodput)) ++t.good;
  }
  find_peaks(run, t);
  return t;
}

std::string table(const BenchRun& run, const Selection& selection) {
  const Totals t = totals(run);
  const double seconds = std::max(run.duration, 1e-9);
  std::string out = fmt::format("{:=^50}\n", " Serving Benchmark Result ");
  const auto whole = [&](const std::string& name, int64_t value) {
    out += fmt::format("{:<40} {:<10}\n", name, value);
  };
  const auto exact = [&](const std::string& name, double value) {
    out += fmt::format("{:<40} {:<10.2f}\n", name, value);
  };
  const double tokens = static_cast<double>(t.output_tokens);
  whole("Successful requests:", t.completed);
  whole("Failed requests:", t.failed);
  if (run.max_concurrency) whole("Maximum request concurrency:", *run.max_concurrency);
  if (!std::isinf(run.request_rate)) exact("Request rate configured (RPS):", run.request_rate);
  exact("Benchmark duration (s):", run.duration);
  whole("Total input tokens:", t.input_tokens);
  whole("Total generated tokens:", t.output_tokens);
  exact("Request throughput (req/s):", t.completed / seconds);
  if (run.goodput.any()) exact("Request goodput (req/s):", t.good / seconds);
  exact("Output token throughput (tok/s):", tokens / seconds);
  exact("Peak output token throughput (tok/s):", t.peak_tokens_per_s);
  exact("Peak concurrent requests:", t.peak_concurrency);
  exact("Total token throughput (tok/s):",
        (static_cast<double>(t.input_tokens) + tokens) / seconds);
  for (const MetricName& metric : kMetrics) {
    if (!selected(selection, metric.key)) continue;
    const Summary s = summarise(values_of(run, metric.key), selection.percentiles);
    out += fmt::format("{:-^50}\n", metric.heading);
    exact(fmt::format("Mean {} (ms):", metric.name), 1e3 * s.mean);
    exact(fmt::format("Median {} (ms):", metric.name), 1e3 * s.median);
    for (const auto& [p, value] : s.percentiles)
      exact(fmt::format("P{} {} (ms):", percent_word(p), metric.name), 1e3 * value);
  }
  if (run.spec_decode && run.spec_decode->draft_tokens > 0.0) {
    const SpecDecode& s = *run.spec_decode;
    out += fmt::format("{:-^50}\n", "Speculative Decoding");
    exact("Acceptance rate (%):", 100.0 * s.accepted_tokens / s.draft_tokens);
    exact("Acceptance length:", 1.0 + s.accepted_tokens / std::max(1.0, s.drafts));
  }
  return out + std::string(50, '=') + "\n";
}

json::Object result_json(const BenchRun& run, const Selection& selection, bool detailed) {
  const Totals t = totals(run);
  const double seconds = std::max(run.duration, 1e-9);
  const double tokens = static_cast<double>(t.output_tokens);
  json::Object o;
  o["request_rate"] =
      std::isinf(run.request_rate) ? json::Value("inf") : json::Value(run.request_rate);
  o["burstiness"] = std::isinf(run.burstiness) ? json::Value("inf") : json::Value(run.burstiness);
  o["max_concurrency"] = run.max_concurrency ? json::Value(*run.max_concurrency) : json::Value();
  o["duration"] = run.duration;
  o["completed"] = t.completed;
  o["failed"] = t.failed;
  o["total_input_tokens"] = t.input_tokens;
  o["total_output_tokens"] = t.output_tokens;
  o["request_throughput"] = t.completed / seconds;
  o["request_goodput"] = run.goodput.any() ? json::Value(t.good / seconds) : json::Value();
  o["output_throughput"] = tokens / seconds;
  o["total_token_throughput"] = (static_cast<double>(t.input_tokens) + tokens) / seconds;
  if (detailed) add_details(run, o);
  o["max_output_tokens_per_s"] = t.peak_tokens_per_s;
  o["max_concurrent_requests"] = t.peak_concurrency;
  for (const MetricName& metric : kMetrics) {
    if (!selected(selection, metric.key)) continue;
    const Summary s = summarise(values_of(run, metric.key), selection.percentiles);
    o[fmt::format("mean_{}_ms", metric.key)] = 1e3 * s.mean;
    o[fmt::format("median_{}_ms", metric.key)] = 1e3 * s.median;
    o[fmt::format("std_{}_ms", metric.key)] = 1e3 * s.standard_deviation;
    for (const auto& [p, value] : s.percentiles)
      o[fmt::format("p{}_{}_ms", percent_word(p), metric.key)] = 1e3 * value;
  }
  if (run.spec_decode) add_spec_decode(*run.spec_decode, o);
  return o;
}

}  // namespace freshet::bench_client

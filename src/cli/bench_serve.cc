// `freshet bench serve`: load on any OpenAI-compatible server, with vLLM's flags and results.
#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "bench_client/serve.h"
#include "bench_client/svg_plot.h"
#include "bench_client/throughput.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/workload_options.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {
namespace bench_serve_command {

struct Sampling {
  std::optional<double> temperature, top_p, min_p, frequency_penalty, presence_penalty,
      repetition_penalty;
  std::optional<int> top_k;
};

struct Options {
  std::string backend = "openai";
  std::string base_url;
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string tokenizer;
  std::string label;
  WorkloadOptions workload;
  bench_client::ServeOptions serve;
  std::string ramp_up;
  bool no_self_timed = false;
  bool rate_given = false;
  std::vector<std::string> headers;
  std::vector<std::string> goodput;
  std::string percentile_metrics = "ttft,tpot,itl";
  std::string metric_percentiles = "99";
  Sampling sampling;
  std::string extra_body;
  bool save_result = false;
  bool save_detailed = false;
  bool append_result = false;
  std::vector<std::string> metadata;
  std::string result_dir;
  std::string result_filename;
  std::string plot;
  bool quiet = false;
};

Status fill_body(const Options& o, json::Object& body) {
  const Sampling& s = o.sampling;
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) body[name] = *value;
  };
  add("temperature", s.temperature);
  add("top_p", s.top_p);
  add("min_p", s.min_p);
  add("frequency_penalty", s.frequency_penalty);
  add("presence_penalty", s.presence_penalty);
  add("repetition_penalty", s.repetition_penalty);
  if (s.top_k) body["top_k"] = *s.top_k;
  if (o.extra_body.empty()) return {};
  auto extra = json::parse(o.extra_body);
  if (!extra.ok()) return extra.status().with_context("--extra-body");
  if (!extra->is_object()) return invalid_argument("--extra-body must be a JSON object");
  for (const auto& [key, value] : extra->as_object()) body[key] = value;
  return {};
}

Result<bench_client::ServeOptions> serve_options(const Options& o) {
  bench_client::ServeOptions s = o.serve;
  s.chat = o.backend == "openai-chat";
  const bool ipv6 = o.host.find(':') != std::string::npos;
  const std::string host = ipv6 ? fmt::format("[{}]", o.host) : o.host;
  s.base_url = !o.base_url.empty() ? o.base_url : fmt::format("http://{}:{}", host, o.port);
  s.api_key = env(EnvVar::kOpenAiKey).value_or("");
  for (const std::string& h : o.headers) {
    FRESHET_ASSIGN_OR_RETURN(auto header, key_value("--header", h));
    s.headers.push_back(std::move(header));
  }
  FRESHET_ASSIGN_OR_RETURN(s.dataset, workload(o.workload));
  s.arrivals.seed = s.dataset.seed;
  if (o.ramp_up == "linear") s.arrivals.ramp_up = bench_client::RampUp::kLinear;
  if (o.ramp_up == "exponential") s.arrivals.ramp_up = bench_client::RampUp::kExponential;
  s.self_timed = !o.no_self_timed && !o.rate_given && o.ramp_up.empty();
  // Synthetic prompts have no natural end: answers get the requested length.
  using bench_client::DatasetKind;
  s.ignore_eos |= s.dataset.kind == DatasetKind::kRandom || s.dataset.kind == DatasetKind::kAzure ||
                  s.dataset.kind == DatasetKind::kMooncake;
  FRESHET_ASSIGN_OR_RETURN(s.goodput, bench_client::parse_goodput(o.goodput));
  FRESHET_RETURN_IF_ERROR(fill_body(o, s.extra_body));
  return s;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%d-%H%M%S", &parts);
  return text;
}

// The default name is the same as in vLLM.
std::string result_path(const Options& o, const bench_client::ServeResult& r,
                        const std::string& date) {
  std::string name = o.result_filename;
  if (name.empty()) {
    const std::string label = o.label.empty() ? o.backend : o.label;
    const auto& limit = r.run.max_concurrency;
    const std::string model = r.model.substr(r.model.find_last_of('/') + 1);
    name = fmt::format("{}-{}qps{}-{}-{}.json", label, r.run.request_rate,
                       limit ? fmt::format("-concurrency{}", *limit) : "", model, date);
  }
  return (std::filesystem::path(o.result_dir) / name).string();
}

Status save(const Options& o, const bench_client::ServeResult& r,
            const bench_client::Selection& selection, int num_prompts) {
  const std::string date = now_text();
  json::Object out;
  out["date"] = date;
  out["endpoint_type"] = o.backend;
  out["backend"] = o.backend;
  out["label"] = o.label.empty() ? json::Value() : json::Value(o.label);
  out["model_id"] = r.model;
  out["tokenizer_id"] = o.tokenizer.empty() ? r.model : o.tokenizer;
  out["num_prompts"] = num_prompts;
  for (const std::string& m : o.metadata) {
    FRESHET_ASSIGN_OR_RETURN(auto entry, key_value("--metadata", m));
    out[entry.first] = entry.second;
  }
  for (const auto& [key, value] : bench_client::result_json(r.run, selection, o.save_detailed))
    out[key] = value;
  if (!o.result_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(o.result_dir, error);
    if (error) return io_error("cannot create the folder {}: {}", o.result_dir, error.message());
  }
  json::WriteOptions spaced;
  spaced.spaces = true;
  const std::string path = result_path(o, r, date);
  FRESHET_RETURN_IF_ERROR(write_text_file(path, json::write(out, spaced) + "\n", o.append_result));
  say("Results: " + path);
  return {};
}

// Prints the first errors; an error if no request succeeded.
Status tell_failures(const bench_client::BenchRun& run) {
  constexpr int kMost = 10;
  int failed = 0;
  std::string first;
  for (const auto& outcome : run.outcomes) {
    if (outcome.success) continue;
    if (failed++ == 0) first = outcome.error;
    if (failed <= kMost) say("failed: " + outcome.error);
  }
  if (failed > kMost) say(fmt::format("... and {} more", failed - kMost));
  if (!run.outcomes.empty() && static_cast<size_t>(failed) == run.outcomes.size())
    return io_error("all {} requests failed: {}", failed, first);
  return {};
}

Status bench_serve(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const bench_client::ServeOptions options, serve_options(o));
  FRESHET_ASSIGN_OR_RETURN(
      const bench_client::Selection selection,
      bench_client::parse_selection(o.percentile_metrics, o.metric_percentiles));
  for (const std::string& m : o.metadata) {
    if (auto entry = key_value("--metadata", m); !entry.ok()) return entry.status();
  }
  std::optional<tokenizer::Tokenizer> tokenizer;
  std::unique_ptr<bench_client::LocalVocabulary> vocabulary;
  if (!o.tokenizer.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.tokenizer));
    FRESHET_ASSIGN_OR_RETURN(tokenizer, tokenizer::Tokenizer::load(path));
    vocabulary = std::make_unique<bench_client::LocalVocabulary>(*tokenizer);
  }
  ProgressLine progress;
  bench_client::ServeHooks hooks;
  hooks.say = [](const std::string& line) { say(line); };
  if (!o.quiet) {
    hooks.progress = [&progress](size_t done, size_t total) {
      progress.update("requests", static_cast<double>(done) / static_cast<double>(total));
    };
  }
  const Interrupts::Handler on_interrupt(context.interrupts, [] {});
  hooks.stop = &context.interrupts.requested();
  FRESHET_ASSIGN_OR_RETURN(const bench_client::ServeResult result,
                           bench_client::bench_serve(options, vocabulary.get(), hooks));
  progress.clear();
  context.out.write(bench_client::table(result.run, selection));
  FRESHET_RETURN_IF_ERROR(context.out.flush());
  if (o.save_result || o.append_result)
    FRESHET_RETURN_IF_ERROR(save(o, result, selection, options.dataset.num_prompts));
  if (!o.plot.empty()) {
    const std::string title = fmt::format("{} · {}", result.model, o.workload.dataset_name);
    FRESHET_RETURN_IF_ERROR(write_text_file(o.plot, bench_client::plot(result.run, title)));
  }
  return tell_failures(result.run);
}

void add_server_options(CLI::App& c, Options& o) {
  const std::string group = "Server";
  c.add_option("--backend", o.backend, "openai (completions) or openai-chat")
      ->check(CLI::IsMember({"openai", "openai-chat", "vllm"}))
      ->capture_default_str()
      ->group(group);
  c.add_option("--base-url", o.base_url, "URL of the server, instead of --host and --port")
      ->group(group);
  c.add_option("--host", o.host, "Host name or address")->capture_default_str()->group(group);
  c.add_option("--port", o.port, "Port")
      ->check(CLI::Range(1, 65535))
      ->capture_default_str()
      ->group(group);
  c.add_option("--endpoint", o.serve.endpoint, "Route (default: the backend's)")->group(group);
  c.add_option("-m,--model", o.serve.model,
               "Model name (default: the first one that the server lists)")
      ->group(group);
  c.add_option("--tokenizer", o.tokenizer,
               "Model folder or file whose tokenizer is used, instead of the server's")
      ->group(group);
  c.add_option("--vocab-size", o.serve.vocab_size,
               "Random prompts use ids below this (default: ask the server)")
      ->check(CLI::Range(0, 1 << 24))
      ->group(group);
  c.add_option("--header", o.headers, "KEY=VALUE, sent with each request")->group(group);
  c.add_flag("--insecure", o.serve.insecure, "Do not check TLS certificates")->group(group);
  c.add_option("--ready-check-timeout-sec", o.serve.ready_timeout_s,
               "Seconds to wait for the server to be ready")
      ->check(not_negative())
      ->group(group);
}

void add_traffic_options(CLI::App& c, Options& o) {
  const std::string group = "Traffic";
  c.add_option_function<double>(
       "--request-rate",
       [&o](const double& rate) {
         o.serve.arrivals.rate = rate;
         o.rate_given = true;
       },
       "Requests per second (default: inf, all at once; traces use their own times)")
      ->group(group);
  c.add_option(
       "--burstiness", o.serve.arrivals.burstiness,
       "Shape of the gamma distribution of arrival gaps: 1 Poisson, below 1 burstier, above 1 "
       "steadier")
      ->capture_default_str()
      ->group(group);
  c.add_option("--max-concurrency", o.serve.max_concurrency,
               "Maximum number of concurrent requests")
      ->group(group);
  c.add_option("--ramp-up-strategy", o.ramp_up, "linear or exponential")
      ->check(CLI::IsMember({"linear", "exponential"}))
      ->group(group);
  c.add_option("--ramp-up-start-rps", o.serve.arrivals.start_rate, "Rate at the start")
      ->group(group);
  c.add_option("--ramp-up-end-rps", o.serve.arrivals.end_rate, "Rate at the end")->group(group);
  c.add_flag("--no-self-timed", o.no_self_timed,
             "azure, mooncake: ignore the trace's arrival times")
      ->group(group);
  c.add_option("--num-warmups", o.serve.warmups, "Warm-up requests, which are not measured")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str()
      ->group(group);
}

void add_body_options(CLI::App& c, Options& o) {
  const std::string group = "Requests";
  c.add_flag("--ignore-eos", o.serve.ignore_eos,
             "Generate the full answer length (always on for random and traces)")
      ->group(group);
  c.add_option("--temperature", o.sampling.temperature, "0: greedy (default: the server's)")
      ->group(group);
  c.add_option("--top-p", o.sampling.top_p, "Sampling parameter")->group(group);
  c.add_option("--top-k", o.sampling.top_k, "Sampling parameter")->group(group);
  c.add_option("--min-p", o.sampling.min_p, "Sampling parameter")->group(group);
  c.add_option("--frequency-penalty", o.sampling.frequency_penalty, "Sampling parameter")
      ->group(group);
  c.add_option("--presence-penalty", o.sampling.presence_penalty, "Sampling parameter")
      ->group(group);
  c.add_option("--repetition-penalty", o.sampling.repetition_penalty, "Sampling parameter")
      ->group(group);
  c.add_option("--logprobs", o.serve.logprobs, "Request this many log-probabilities per token")
      ->check(CLI::Range(0, 20))
      ->group(group);
  c.add_option("--extra-body", o.extra_body, "A JSON object merged into each request")
      ->group(group);
}

void add_result_options(CLI::App& c, Options& o) {
  const std::string group = "Results";
  c.add_option("--goodput", o.goodput,
               "Latency limits in ms of a good request: ttft:200 tpot:50 e2el:2000")
      ->group(group);
  c.add_option("--percentile-metrics", o.percentile_metrics,
               "Metrics to report, comma-separated: ttft, tpot, itl, e2el, client_queue_time, "
               "e2el_including_client_queue")
      ->capture_default_str()
      ->group(group);
  c.add_option("--metric-percentiles", o.metric_percentiles, "Percentiles to report, e.g. 50,99")
      ->capture_default_str()
      ->group(group);
  c.add_flag("--save-result", o.save_result, "Write the results to a JSON file")->group(group);
  c.add_flag("--save-detailed", o.save_detailed, "Add per-request details to the JSON file")
      ->group(group);
  c.add_flag("--append-result", o.append_result, "Append the results to the JSON file")
      ->group(group);
  c.add_option("--result-dir", o.result_dir, "Folder of the JSON file")->group(group);
  c.add_option("--result-filename", o.result_filename, "Name of the JSON file")->group(group);
  c.add_option("--label", o.label, "First part of the JSON file's name (default: the backend)")
      ->group(group);
  c.add_option("--metadata", o.metadata, "KEY=VALUE, added to the JSON file")->group(group);
  c.add_option("--plot", o.plot, "Write an SVG plot: latency distributions, throughput over time")
      ->group(group);
  c.add_flag("--disable-tqdm", o.quiet, "Show no progress")->group(group);
}

}  // namespace bench_serve_command

void add_bench_serve(CLI::App& bench, Context& context, Action& action) {
  auto o = std::make_shared<bench_serve_command::Options>();
  CLI::App* c = bench.add_subcommand("serve", "Measure a running OpenAI-compatible server");
  add_server_options(*c, *o);
  add_workload_options(*c, o->workload);
  add_traffic_options(*c, *o);
  add_body_options(*c, *o);
  add_result_options(*c, *o);
  add_examples(
      *c,
      "  freshet bench serve --num-prompts 200 --request-rate 4 --plot run.svg\n"
      "  freshet bench serve --backend openai-chat --dataset-name sharegpt \\\n"
      "      --dataset-path sharegpt.json --max-concurrency 32 --goodput ttft:500 tpot:50\n"
      "  freshet bench serve --dataset-name mooncake --dataset-path trace.jsonl \\\n"
      "      --trace-speed 0.1 --save-result --metadata machine=desk\n"
      "A key for the server is read from OPENAI_API_KEY.");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return bench_serve(*o, context); }; });
}

}  // namespace freshet::cli

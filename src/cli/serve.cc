#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/utc_time.h"
#include "cli/command.h"
#include "cli/help.h"
#include "cli/media_options.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "server/app.h"
#include "server/sampling_defaults.h"
#include "server/start_gate.h"
#include "server/throughput_log.h"

namespace freshet::cli {
namespace serve_command {

struct Options {
  std::string model;
  RunOptions run;
  EngineOptions engine;  // scheduler options only
  server::HttpOptions http;
  server::AppOptions app;
  MediaFlags media;
  std::string api_key_file;
  std::string chat_template_file;
  double shutdown_timeout_s = 30.0;
  bool prefix_caching = true;
  bool kv_cache_metrics = false;
  bool no_access_log = false;
  double log_stats_interval_s = 10.0;  // 0: no throughput lines
  bool no_web_page = false;
  std::string generation_config = "auto";
};

Result<std::string> read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return not_found("cannot read {}", path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// Collects the keys of --api-key, --api-key-file (one per line) and FRESHET_API_KEY.
Status collect_keys(Options& o) {
  if (!o.api_key_file.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const std::string text, read_text(o.api_key_file));
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (!line.empty()) o.app.api_keys.push_back(line);
    }
    if (o.app.api_keys.empty())
      return invalid_argument("--api-key-file {} has no key", o.api_key_file);
  }
  if (const auto key = env(EnvVar::kApiKey); key && !key->empty()) o.app.api_keys.push_back(*key);
  return {};
}

// "models/SmolLM2-135M.gguf" -> "SmolLM2-135M"
std::string name_of_model(const std::string& model) {
  std::string name = model.empty() ? "default" : model;
  while (name.size() > 1 && name.back() == '/') name.pop_back();
  name = name.substr(name.find_last_of('/') + 1);
  if (name.ends_with(".gguf")) name.resize(name.size() - 5);
  return name;
}

class Shutdown {
 public:
  void request() {
    std::lock_guard lock(mutex_);
    requested_ = true;
    changed_.notify_all();
  }
  // Waits for a request, at most `seconds` (0: without limit). Returns whether there was one.
  bool wait(double seconds) {
    std::unique_lock lock(mutex_);
    const auto requested = [this] { return requested_; };
    if (seconds > 0.0)
      return changed_.wait_for(lock, std::chrono::duration<double>(seconds), requested);
    changed_.wait(lock, requested);
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool requested_ = false;
};

// Lines on standard error. The server never waits for a reader of them: it drops lines instead.
class AccessLog {
 public:
  void write(const std::string& line) {
    const std::lock_guard lock(mutex_);
    if (dropped_ > 0) {
      const auto gap =
          fmt::format("freshet: {} lines of the log were dropped: nobody read them", dropped_);
      if (say_unless_it_blocks(gap)) dropped_ = 0;
    }
    if (dropped_ > 0 || !say_unless_it_blocks(line)) ++dropped_;
  }

 private:
  std::mutex mutex_;
  int64_t dropped_ = 0;
};

Result<EngineOptions> serving_options(const Options& o, const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(EngineOptions e, engine_options(o.run, path));
  e.max_num_seqs = o.engine.max_num_seqs;
  e.max_num_batched_tokens = o.engine.max_num_batched_tokens;
  e.enable_prefix_caching = o.prefix_caching;
  e.picture_cache_bytes = static_cast<size_t>(o.media.cache_gib * 0x1p30);
  e.state_checkpoint_interval = o.engine.state_checkpoint_interval;
  e.state_checkpoint_share = o.engine.state_checkpoint_share;
  if (o.kv_cache_metrics) e.kv_cache_metrics_sample = o.engine.kv_cache_metrics_sample;
  e.max_num_queued_reqs = o.engine.max_num_queued_reqs;
  e.max_num_queued_tokens = o.engine.max_num_queued_tokens;
  e.batching = o.engine.batching;
  e.max_batch_size = o.engine.max_batch_size;
  e.max_wait_time_ms = o.engine.max_wait_time_ms;
  e.max_tokens_per_batch = o.engine.max_tokens_per_batch;
  e.preferred_batch_sizes = o.engine.preferred_batch_sizes;
  return e;
}

// Whether --log-level leaves out the server's own lines: address, throughput, access log.
bool is_quiet(const Options& o) {
  return !o.run.log_level.empty() && log_level_of(o.run) > LogLevel::kInfo;
}

std::string address_of(const Options& o, const server::HttpServer& http) {
  return fmt::format("{}://{}", o.http.tls_certificate.empty() ? "http" : "https",
                     server::host_and_port(o.http.host, http.port()));
}

// Fills o.app from the other options.
Status complete_app_options(Options& o, const std::string& path) {
  FRESHET_RETURN_IF_ERROR(collect_keys(o));
  if (!o.chat_template_file.empty()) {
    FRESHET_ASSIGN_OR_RETURN(o.app.chat_template, read_text(o.chat_template_file));
  }
  if (o.app.served_model_names.empty()) o.app.served_model_names.push_back(name_of_model(o.model));
  o.app.web_page = !o.no_web_page;
  FRESHET_ASSIGN_OR_RETURN(o.app.media, media_options(o.media));
  FRESHET_ASSIGN_OR_RETURN(o.app.sampling_defaults, default_sampling(o.generation_config, path));
  return {};
}

// Waits for a signal, and prints throughput meanwhile.
void run_until_signal(const Options& o, Shutdown& shutdown, const Engine& engine, AccessLog& log) {
  using Clock = std::chrono::steady_clock;
  const double interval = is_quiet(o) ? 0.0 : o.log_stats_interval_s;
  server::ThroughputLog throughput;
  Clock::time_point last = Clock::now();
  while (!shutdown.wait(interval)) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - last).count();
    last = now;
    if (const auto line = throughput.line(engine.stats(), seconds))
      log.write(fmt::format("{} {}", utc_now(), *line));
  }
}

Status serve(Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_RETURN_IF_ERROR(complete_app_options(o, path));
  FRESHET_ASSIGN_OR_RETURN(EngineOptions options, serving_options(o, path));
  const bool quiet = is_quiet(o);
  // In the order in which they must outlive each other: the HTTP server goes first.
  AccessLog log;
  server::StartGate gate;
  std::unique_ptr<server::App> app;
  std::unique_ptr<Engine> engine;
  if (!o.no_access_log && !quiet)
    o.app.access_log = [&log](const std::string& line) { log.write(line); };
  // Bound before the model is loaded: a busy port is an error at once.
  FRESHET_ASSIGN_OR_RETURN(const std::unique_ptr<server::HttpServer> http,
                           server::HttpServer::listen(o.http));
  if (o.app.api_keys.empty() && !http->is_loopback()) {
    log_warning(
        "everyone who can reach {} can use this server: set --api-key or FRESHET_API_KEY, or "
        "--host "
        "127.0.0.1",
        address_of(o, *http));
  }
  http->serve([&gate](std::shared_ptr<server::Exchange> x) { gate.handle(std::move(x)); });
  if (!quiet)
    say(fmt::format("freshet: loading {}; until then, {} answers 503",
                    o.app.served_model_names.front(), address_of(o, *http)));
  {
    ProgressLine progress;
    options.on_progress = [&](const std::string& stage, double f) {
      progress.update(stage, f);
      gate.progress(stage, f);
    };
    FRESHET_ASSIGN_OR_RETURN(engine, open_on_device(o.run, progress, options, Engine::load));
  }
  if (o.run.verbose) say(engine->memory_plan());
  Shutdown shutdown;
  const Interrupts::Handler handler(context.interrupts, [&] { shutdown.request(); });
  const auto post = [&http](std::function<void()> task) { http->post(std::move(task)); };
  FRESHET_ASSIGN_OR_RETURN(app, server::App::create(*engine, o.app, post));
  gate.open([&app](std::shared_ptr<server::Exchange> x) { app->handle(std::move(x)); });
  if (!o.app.sampling_defaults.empty() && !quiet) {
    say(fmt::format("freshet: default sampling parameters: {}",
                    json::write(json::Value(o.app.sampling_defaults))));
  }
  const std::string left_out = server::left_out_defaults(o.generation_config, path);
  if (!left_out.empty() && !quiet) {
    say(
        fmt::format("freshet: generation_config.json also asks for {}: not done by itself "
                    "(\"use_beam_search\" and \"min_tokens\" are fields of a request)",
                    left_out));
  }
  if (!quiet)
    say(fmt::format("freshet: serving {} at {}", app->model_name(), address_of(o, *http)));
  run_until_signal(o, shutdown, *engine, log);
  if (!quiet)
    say_unless_it_blocks(
        "freshet: waiting for running requests; press Ctrl-C again to stop at once");
  app->drain();
  const bool finished = http->stop(o.shutdown_timeout_s);
  app->end_work();
  engine.reset();  // before anything that its callbacks use is destroyed
  if (!finished) return io_error("some requests were cut off after {} s", o.shutdown_timeout_s);
  return {};
}

void add_http_options(CLI::App& command, Options& o) {
  command.add_option("--host", o.http.host, "Address to listen on")
      ->capture_default_str()
      ->group("Server");
  command.add_option("--port", o.http.port, "Port; 0: any free one")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535))
      ->group("Server");
  command
      .add_option("--served-model-name", o.app.served_model_names,
                  "Names of the model in the API; the first one is reported")
      ->group("Server");
  command
      .add_option("--api-key", o.app.api_keys,
                  "API keys; a request must send one of them (also FRESHET_API_KEY)")
      ->group("Server");
  command.add_option("--api-key-file", o.api_key_file, "File with one key per line")
      ->group("Server");
  command
      .add_option("--allowed-origins", o.app.allowed_origins,
                  "Web origins that may call the API; * for any")
      ->group("Server");
  command.add_option("--ssl-certfile", o.http.tls_certificate, "TLS certificate chain, PEM")
      ->group("Server");
  command.add_option("--ssl-keyfile", o.http.tls_key, "TLS private key, PEM")->group("Server");
  command
      .add_option("--chat-template", o.chat_template_file,
                  "Jinja file to use instead of the model's template")
      ->group("Server");
  add_generation_config_option(command, o.generation_config)->group("Server");
  command
      .add_option("--tool-call-parser", o.app.tool_call_parser,
                  "Format of tool calls: hermes, llama3_json, mistral (default: from the template)")
      ->group("Server");
  command
      .add_option("--reasoning-parser", o.app.reasoning_parser,
                  "Separates reasoning from the answer: " + server::reasoning_parser_names() +
                      " (default: reasoning stays in the text)")
      ->group("Server");
  command
      .add_option_function<std::string>(
          "--pooling",
          [&o](const std::string& s) {
            o.app.pooling = s == "mean"   ? Pooling::kMean
                            : s == "cls"  ? Pooling::kFirst
                            : s == "max"  ? Pooling::kMax
                            : s == "last" ? Pooling::kLast
                                          : Pooling::kModel;
          },
          "Embeddings: the hidden state of the first or last token, or the mean or maximum of all "
          "tokens; auto: as the model's files say")
      ->check(CLI::IsMember({"auto", "cls", "last", "max", "mean"}))
      ->default_str("auto")
      ->group("Server");
  command
      .add_flag("--disable-access-log", o.no_access_log,
                "Turn off the access log (one JSON line per request on standard error)")
      ->group("Server");
  command
      .add_flag("--access-log-polls", o.app.log_polls,
                "Log the requests of probes, too: /health, /ping, /ready, /metrics")
      ->group("Server");
  command
      .add_option("--log-stats-interval", o.log_stats_interval_s,
                  "Seconds between lines of throughput, printed while there is work; 0: none")
      ->capture_default_str()
      ->check(not_negative())
      ->group("Server");
  command.add_flag("--no-webui", o.no_web_page, "Turn off the chat page at /")->group("Server");
}

void add_limit_options(CLI::App& command, Options& o) {
  command
      .add_option("--max-connections", o.http.max_connections, "Maximum number of open connections")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
  command.add_option("--max-body-bytes", o.http.max_body_bytes, "Maximum size of a request body")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->group(kRareGroup);
  command
      .add_option("--max-header-bytes", o.http.max_header_bytes, "Maximum size of a request header")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20))  // sizes each connection's buffer
      ->group(kRareGroup);
  command
      .add_option("--header-timeout", o.http.header_timeout_s,
                  "Seconds from a request's first byte to the end of its header")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
  command.add_option("--body-timeout", o.http.body_timeout_s, "Seconds to receive a request body")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
  command
      .add_option(
          "--write-timeout", o.http.write_timeout_s,
          "Seconds without write progress before a client that does not read is disconnected")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
  command
      .add_option("--shutdown-timeout", o.shutdown_timeout_s,
                  "Seconds that running requests may take to finish after SIGTERM")
      ->capture_default_str()
      ->check(not_negative())
      ->group(kRareGroup);
}

void add_scheduler_options(CLI::App& command, Options& o) {
  EngineOptions& e = o.engine;
  command
      .add_option("--max-num-seqs", e.max_num_seqs,
                  "Maximum number of sequences per step (default: 256; 1024 on a large GPU)")
      ->check(above_zero())
      ->group("Scheduler");
  command
      .add_option(
          "--max-num-batched-tokens", e.max_num_batched_tokens,
          "Maximum number of tokens per step; longer prompts are cut into chunks (default: 2048; "
          "512 on up to 4 cores, 8192 on a large GPU)")
      ->check(above_zero())
      ->group("Scheduler");
  command
      .add_option("--max-num-queued-reqs", e.max_num_queued_reqs,
                  "Maximum number of waiting requests, beyond it 429; 0: no limit")
      ->capture_default_str()
      ->check(not_negative())
      ->group("Scheduler");
  command
      .add_option("--max-num-queued-tokens", e.max_num_queued_tokens,
                  "Maximum number of waiting prompt tokens, beyond it 429; 0: no limit")
      ->capture_default_str()
      ->check(not_negative())
      ->group("Scheduler");
  command
      .add_flag("--enable-prefix-caching,!--no-enable-prefix-caching", o.prefix_caching,
                "Reuse cached prefixes between requests (default: on)")
      ->group("Scheduler");
  command
      .add_option("--mamba-checkpoint-interval,--mamba-track-interval", e.state_checkpoint_interval,
                  "Models with states (Mamba, linear attention): tokens between cached states")
      ->capture_default_str()
      ->check(CLI::Range(16, 1 << 20))
      ->group("Scheduler");
  command
      .add_option("--mamba-checkpoint-share", e.state_checkpoint_share,
                  "Share of the cache that is planned for cached states")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 0.9))
      ->group("Scheduler");
  command.add_option("--batching", e.batching, "continuous, static or dynamic")
      ->capture_default_str()
      ->check(CLI::IsMember({"continuous", "static", "dynamic"}))
      ->group(kRareGroup);
  command
      .add_option("--max-batch-size", e.max_batch_size,
                  "Static and dynamic batching: maximum number of requests in a batch")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
  command
      .add_option("--max-wait-time-ms", e.max_wait_time_ms,
                  "Static and dynamic batching: longest wait for a full batch, in ms")
      ->capture_default_str()
      ->check(not_negative())
      ->group(kRareGroup);
  command
      .add_option("--max-tokens-per-batch", e.max_tokens_per_batch,
                  "Static and dynamic batching: maximum number of tokens in a batch")
      ->capture_default_str()
      ->check(above_zero())
      ->group(kRareGroup);
  command
      .add_option("--preferred-batch-sizes", e.preferred_batch_sizes,
                  "Dynamic batching: start a batch at once when it has one of these sizes")
      ->group(kRareGroup);
}

void add_metrics_options(CLI::App& command, Options& o) {
  command
      .add_option("--slot-save-path", o.app.slot_save_path,
                  "Folder for POST /slots/N?action=save and restore (default: none)")
      ->group(kRareGroup);
  command
      .add_flag("--kv-cache-metrics", o.kv_cache_metrics,
                "Add lifetime, idle time and reuse gap of cached blocks to /metrics")
      ->group(kRareGroup);
  o.engine.kv_cache_metrics_sample = 0.01;
  command
      .add_option("--kv-cache-metrics-sample", o.engine.kv_cache_metrics_sample,
                  "Fraction of blocks to sample for these metrics")
      ->capture_default_str()
      ->check(CLI::Range(1e-6, 1.0))
      ->group(kRareGroup);
}

}  // namespace serve_command

void add_serve(CLI::App& program, Context& context, Action& action) {
  CLI::App& command = *program.add_subcommand("serve", "Serve a model over the OpenAI API");
  auto o = std::make_shared<serve_command::Options>();
  command.add_option("MODEL,-m,--model", o->model,
                     "Model folder, .gguf file or name (default: the embedded model)");
  add_mmproj_option(command, o->run);
  add_overrides_option(command, o->run);
  add_engine_options(command, o->run);
  add_http_options(command, *o);
  add_media_options(command, o->media);
  add_limit_options(command, *o);
  add_scheduler_options(command, *o);
  add_metrics_options(command, *o);
  add_examples(command,
               "  freshet serve smollm2\n"
               "  freshet serve model.gguf --host 0.0.0.0 --port 8080 --api-key secret\n"
               "  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
               "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'");
  command.callback(
      [o, &context, &action] { action = [o, &context] { return serve(*o, context); }; });
}

}  // namespace freshet::cli

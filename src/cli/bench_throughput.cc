// `freshet bench throughput`: the workloads of `bench serve` on an engine in this process.
#include <memory>
#include <string>

#include "bench_client/throughput.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/workload_options.h"
#include "layers/model.h"

namespace freshet::cli {
namespace bench_throughput_command {

struct Options {
  std::string model;
  RunOptions run;
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  bool no_prefix_caching = false;
  std::string load_format = "auto";
  WorkloadOptions workload;
  SamplingParams params;
  int samples = 1;
  bool stop_at_eos = false;
  std::string output_json;
  bool quiet = false;
};

std::string describe_steps(const EngineStats& s, double seconds) {
  const auto steps = static_cast<double>(std::max<int64_t>(1, s.steps));
  std::string text =
      fmt::format("steps: {}, {:.2f} ms and {:.0f} tokens each on average; {} preemptions", s.steps,
                  seconds / steps * 1e3, static_cast<double>(s.step_tokens) / steps, s.preemptions);
  if (s.device_wait_seconds > 0.0) {
    text += fmt::format("; the host waited for the GPU {:.0f} % of the time",
                        s.device_wait_seconds / seconds * 100.0);
  }
  return text;
}

Status bench_throughput(const Options& o, Context& context) {
  bench_client::ThroughputOptions options;
  FRESHET_ASSIGN_OR_RETURN(options.dataset, workload(o.workload));
  options.samples = o.samples;
  options.params = o.params;
  options.params.ignore_eos = !o.stop_at_eos;
  options.params.seed = options.dataset.seed;
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(EngineOptions e, engine_options(o.run, path));
  e.max_num_seqs = o.max_num_seqs;
  e.max_num_batched_tokens = o.max_num_batched_tokens;
  e.enable_prefix_caching = !o.no_prefix_caching;
  e.load_format = o.load_format;
  ProgressLine progress;
  if (!o.quiet) {
    e.on_progress = [&](const std::string& stage, double done) { progress.update(stage, done); };
    options.progress = [&](size_t done, size_t total) {
      progress.update("requests", static_cast<double>(done) / static_cast<double>(total));
    };
  }
  FRESHET_ASSIGN_OR_RETURN(const auto engine, open_on_device(o.run, progress, e, Engine::load));
  if (o.run.verbose) say(engine->memory_plan());
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  options.ids = engine->model().spec().vocab_size;
  options.stop = &context.interrupts.requested();
  FRESHET_ASSIGN_OR_RETURN(const bench_client::ThroughputResult result,
                           bench_client::bench_throughput(*engine, options));
  progress.clear();
  if (o.run.verbose) say(describe_steps(engine->stats(), result.elapsed));
  context.out.write(bench_client::throughput_text(result));
  if (o.output_json.empty()) return {};
  json::WriteOptions layout;
  layout.indent = 4;
  return write_text_file(o.output_json,
                         json::write(bench_client::throughput_json(result), layout) + "\n");
}

}  // namespace bench_throughput_command

void add_bench_throughput(CLI::App& bench, Context& context, Action& action) {
  auto o = std::make_shared<bench_throughput_command::Options>();
  CLI::App* c = bench.add_subcommand(
      "throughput", "Measure the engine's throughput on many requests, without a server");
  c->add_option("MODEL,-m,--model", o->model,
                "Model folder, .gguf file or name (default: the embedded model)");
  c->add_option("--n", o->samples, "Number of answers per prompt")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  c->add_option("--temperature", o->params.temperature, "0: greedy")->capture_default_str();
  c->add_flag("--stop-at-eos", o->stop_at_eos,
              "Stop at an end-of-text token (default: generate the full length)");
  c->add_option("--max-num-seqs", o->max_num_seqs,
                "Maximum number of sequences per step (default: 256; 1024 on a large GPU)")
      ->check(CLI::Range(1, 65536));
  c->add_option("--max-num-batched-tokens", o->max_num_batched_tokens,
                "Maximum number of tokens per step (default: 2048; 512 on up to 4 cores, 8192 on a "
                "large GPU)")
      ->check(CLI::Range(1, 1 << 20));
  c->add_flag("--no-enable-prefix-caching", o->no_prefix_caching, "Do not reuse cached prefixes");
  c->add_option("--load-format", o->load_format,
                "auto, or dummy:FORMAT: random weights with the shapes of MODEL/config.json")
      ->capture_default_str();
  c->add_option("--output-json", o->output_json, "Write the results to this JSON file");
  c->add_flag("--disable-tqdm", o->quiet, "Show no progress");
  add_engine_options(*c, o->run);
  add_workload_options(*c, o->workload);
  add_mmproj_option(*c, o->run);
  add_examples(*c,
               "  freshet bench throughput smollm2 --num-prompts 64 --input-len 128 "
               "--output-len 64\n"
               "  freshet bench throughput model.gguf --dataset-name sharegpt \\\n"
               "      --dataset-path sharegpt.json --num-prompts 100 --output-json numbers.json");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return bench_throughput(*o, context); }; });
}

}  // namespace freshet::cli

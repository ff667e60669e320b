#include "eval/bench.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu_topology.h"
#include "base/json.h"
#include "base/units.h"
#include "bench_client/report.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "eval/bench_engine.h"
#include "eval/ceilings.h"
#include "eval/session.h"

namespace freshet::cli {
namespace bench_command {

struct Options {
  std::vector<std::string> models;
  std::string prompts = "512";
  std::string generates = "128";
  std::vector<std::string> pairs;  // "512,128"
  std::string depths = "0";
  std::string batches = "512";
  std::string threads;
  std::string sequences = "1";
  int repetitions = 5;
  std::string format = "md";
  bool json = false;
  std::string load_format = "auto";
  bool engine = false;
  RunOptions run;
};

Result<std::vector<int>> numbers(const char* flag, const std::string& text, int least) {
  std::vector<int> values;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    int value = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + comma, value);
    if (error != std::errc() || end != text.data() + comma || value < least || value > (1 << 24)) {
      return invalid_argument("{} {}: write comma-separated numbers of at least {}", flag, text,
                              least);
    }
    values.push_back(value);
    at = comma + 1;
  }
  return values;
}

// One loaded model and the tests to time on it.
struct Plan {
  std::string model;
  int threads = 0;
  int batch = 512;
  std::vector<eval::BenchTest> tests;
};

struct Row {
  std::string model;
  std::string architecture;
  std::string backend;  // "CPU", or the GPU's name
  size_t model_bytes = 0;
  int64_t parameters = 0;
  int threads = 0;
  int batch = 0;
  eval::BenchResult result;
  eval::Ceilings ceilings;
  std::optional<bench_client::SpecDecode> drafting;  // with --speculative-config
  std::optional<EngineStats::Speculation> gauge;     // the same
};

Result<std::vector<eval::BenchTest>> tests_of(const Options& o) {
  FRESHET_ASSIGN_OR_RETURN(const auto prompts, numbers("-p", o.prompts, 0));
  FRESHET_ASSIGN_OR_RETURN(const auto generates, numbers("-n", o.generates, 0));
  FRESHET_ASSIGN_OR_RETURN(const auto depths, numbers("-d", o.depths, 0));
  FRESHET_ASSIGN_OR_RETURN(const auto sequences, numbers("--sequences", o.sequences, 1));
  std::vector<eval::BenchTest> tests;
  for (const int depth : depths) {
    for (const int p : prompts) {
      if (p > 0) tests.push_back({.prompt = p, .depth = depth});
    }
    for (const int n : generates) {
      for (const int s : sequences) {
        if (n > 0) tests.push_back({.generate = n, .depth = depth, .sequences = s});
      }
    }
    for (const std::string& pair : o.pairs) {
      FRESHET_ASSIGN_OR_RETURN(const auto both, numbers("-pg", pair, 1));
      if (both.size() != 2)
        return invalid_argument("-pg {}: write two numbers, e.g. 512,128", pair);
      tests.push_back({.prompt = both[0], .generate = both[1], .depth = depth});
    }
  }
  if (tests.empty()) return invalid_argument("nothing to do: -p, -n and -pg are all 0");
  return tests;
}

Result<std::vector<Plan>> plans_of(const Options& o) {
  FRESHET_ASSIGN_OR_RETURN(const auto tests, tests_of(o));
  FRESHET_ASSIGN_OR_RETURN(const auto batches, numbers("-b", o.batches, 1));
  std::vector<int> threads = {0};
  if (!o.threads.empty()) {
    FRESHET_ASSIGN_OR_RETURN(threads, numbers("-t", o.threads, 1));
  }
  std::vector<Plan> plans;
  const std::vector<std::string> embedded = {""};
  for (const std::string& model : o.models.empty() ? embedded : o.models) {
    for (const int t : threads) {
      for (const int b : batches) plans.push_back({model, t, b, tests});
    }
  }
  return plans;
}

// Widths of the columns whose texts are known beforehand. The table fits 100 columns.
struct Columns {
  size_t model = 5;
  size_t test = 4;
};

class Report {
 public:
  // drafts: rows tell about speculation instead of the machine's limits.
  Report(std::string format, const Columns& columns, bool drafts, Output& out)
      : format_(std::move(format)), columns_(columns), drafts_(drafts), out_(out) {}
  Status add(const Row& row);
  Status end();

 private:
  Status begin();
  void add_md(const Row& row);
  void legend();
  json::Object to_json(const Row& row) const;

  std::string format_;
  Columns columns_;
  bool drafts_;
  Output& out_;
  int rows_ = 0;
  std::vector<std::string> limits_;  // lines of the legend, one for each setting
};

std::string file_name(const std::string& path) {
  if (path.empty()) return "default";
  const size_t end = path.find_last_not_of('/');
  const size_t slash = path.find_last_of('/', end);
  return path.substr(slash + 1, end - slash);
}

// Shortens a name in the middle: its beginning and its end tell models apart.
std::string shortened(const std::string& name, size_t most) {
  if (name.size() <= most) return name;
  const size_t front = (most - 3) / 2;
  return name.substr(0, front) + "..." + name.substr(name.size() - (most - 3 - front));
}

Columns columns_of(const std::vector<Plan>& plans) {
  constexpr size_t kOthers = 73;  // everything but model and test: size, threads, t/s, GB/s, GOP/s
  Columns columns;
  for (const Plan& plan : plans) {
    columns.model = std::max(columns.model, file_name(plan.model).size());
    for (const eval::BenchTest& t : plan.tests)
      columns.test = std::max(columns.test, t.name().size());
  }
  constexpr size_t kLeast = 8;
  const size_t room = 100 - kOthers - std::min<size_t>(columns.test, 100 - kOthers - kLeast);
  columns.model = std::min(columns.model, std::max(kLeast, room));
  return columns;
}

Status Report::begin() {
  if (format_ == "md") {
    out_.print("| {:{}} | {:>8} | {:>3} | {:{}} | {:>15} | {:>12} | {:>13} |\n", "model",
               columns_.model, "size", "thr", "test", columns_.test, "tokens/s",
               drafts_ ? "tokens/step" : "GB/s", drafts_ ? "accepted" : "GOP/s");
    out_.print(
        "| {:-<{}} | -------: | --: | {:-<{}} | --------------: | -----------: | "
        "------------: |\n",
        "", columns_.model, "", columns_.test);
  }
  if (format_ == "csv") {
    out_.print(
        "model,architecture,size,params,backend,threads,batch,n_prompt,n_gen,n_depth,sequences,"
        "test,median_ts,stddev_ts,{}\n",
        drafts_ ? "tokens_per_step,accepted_fraction"
                : "read_gb_s,read_fraction,gop_s,ops_fraction");
  }
  if (format_ == "json") out_.write("[");
  return out_.flush();
}

void add_limits(const Row& row, json::Object& j) {
  const eval::BenchResult& r = row.result;
  const double s = r.median_s();
  j["read_bytes_per_s"] = r.work.bytes / s;
  j["operations_per_s"] = r.work.operations / s;
  j["ceiling_read_bytes_per_s"] = row.ceilings.read;
  j["ceiling_operations_per_s"] = row.ceilings.operations;
  j["ceiling_operations_name"] = row.ceilings.operations_name;
  if (row.ceilings.read > 0.0) j["read_fraction"] = r.work.bytes / s / row.ceilings.read;
  if (row.ceilings.operations > 0.0)
    j["operations_fraction"] = r.work.operations / s / row.ceilings.operations;
}

// What the engine measured and expected, and the costs that it knows, in milliseconds.
void add_gauge(const EngineStats::Speculation& s, json::Object& j) {
  j["spec_decode_gain"] = s.gain();
  j["spec_decode_predicted_gain"] = s.predicted_gain();
  j["spec_decode_round_ms"] = 1e3 * s.round_seconds;
  json::Object steps;
  for (size_t i = 0; i < s.kRows.size(); ++i)
    steps[fmt::format("{}", s.kRows[i])] = 1e3 * s.seconds_by_rows[i];
  j["spec_decode_step_ms"] = std::move(steps);
}

json::Object Report::to_json(const Row& row) const {
  const eval::BenchResult& r = row.result;
  json::Object j;
  j["build_version"] = FRESHET_VERSION;
  j["model_filename"] = row.model;
  j["model_type"] = row.architecture;
  j["model_size"] = row.model_bytes;
  j["model_n_params"] = row.parameters;
  j["backend"] = row.backend;
  j["n_threads"] = row.threads;
  j["n_batch"] = row.batch;
  j["n_prompt"] = r.test.prompt;
  j["n_gen"] = r.test.generate;
  j["n_depth"] = r.test.depth;
  j["n_sequences"] = r.test.sequences;
  j["test"] = r.test.name();
  j["median_ts"] = r.tokens_per_s();
  j["stddev_ts"] = r.spread();
  json::Array samples_ns, samples_ts;
  double sum_ns = 0.0, sum_ts = 0.0;
  for (const double x : r.seconds) {
    samples_ns.emplace_back(static_cast<int64_t>(x * 1e9));
    samples_ts.emplace_back(static_cast<double>(r.test.tokens()) / x);
    sum_ns += x * 1e9;
    sum_ts += static_cast<double>(r.test.tokens()) / x;
  }
  const auto n = static_cast<double>(r.seconds.size());
  j["avg_ns"] = static_cast<int64_t>(sum_ns / n);
  j["avg_ts"] = sum_ts / n;
  j["samples_ns"] = std::move(samples_ns);
  j["samples_ts"] = std::move(samples_ts);
  if (row.drafting) bench_client::add_spec_decode(*row.drafting, j);
  if (row.gauge) add_gauge(*row.gauge, j);
  if (!drafts_) add_limits(row, j);
  return j;
}

std::string csv_limits(const Row& row) {
  const eval::BenchResult& r = row.result;
  const double read = r.work.bytes / r.median_s(), operations = r.work.operations / r.median_s();
  return fmt::format("{:.3f},{:.4f},{:.3f},{:.4f}", read / 1e9,
                     row.ceilings.read > 0.0 ? read / row.ceilings.read : 0.0, operations / 1e9,
                     row.ceilings.operations > 0.0 ? operations / row.ceilings.operations : 0.0);
}

std::string csv_drafts(const Row& row) {
  if (!row.drafting) return "1,0";
  const bench_client::SpecDecode& s = *row.drafting;
  return fmt::format("{:.4f},{:.4f}", 1.0 + s.accepted_tokens / s.drafts,
                     s.accepted_tokens / s.draft_tokens);
}

// Writes the heading together with the first row: a run that fails earlier writes nothing.
Status Report::add(const Row& row) {
  if (rows_ == 0) FRESHET_RETURN_IF_ERROR(begin());
  const eval::BenchResult& r = row.result;
  if (format_ == "md") add_md(row);
  if (format_ == "csv") {
    out_.print("\"{}\",{},{},{},{},{},{},{},{},{},{},{},{:.4f},{:.4f},{}\n", row.model,
               row.architecture, row.model_bytes, row.parameters, row.backend, row.threads,
               row.batch, r.test.prompt, r.test.generate, r.test.depth, r.test.sequences,
               r.test.name(), r.tokens_per_s(), r.spread(),
               drafts_ ? csv_drafts(row) : csv_limits(row));
  }
  if (format_ == "json") {
    out_.write(rows_ == 0 ? "\n" : ",\n");
    out_.write(json::write(json::Value(to_json(row)), {.indent = 2}));
  }
  ++rows_;
  return out_.flush();
}

// The last two columns: shares of the machine's limits, or what drafts gave.
std::pair<std::string, std::string> md_limits(const Row& row) {
  const eval::BenchResult& r = row.result;
  const auto share = [&](double work, double limit) {
    const double rate = work / r.median_s(), percent = limit > 0.0 ? 100.0 * rate / limit : 0.0;
    const std::string number = fmt::format("{:.{}f}", rate / 1e9, rate < 1e11 ? 1 : 0);
    // Far beyond the limit, something else took the machine while the limit was measured.
    return limit > 0.0 && percent < 999.5 ? fmt::format("{} ({:.0f} %)", number, percent) : number;
  };
  return {share(r.work.bytes, row.ceilings.read),
          share(r.work.operations, row.ceilings.operations)};
}

std::pair<std::string, std::string> md_drafts(const Row& row) {
  if (!row.drafting) return {"no drafts", ""};
  const bench_client::SpecDecode& s = *row.drafting;
  return {fmt::format("{:.2f}", 1.0 + s.accepted_tokens / s.drafts),
          fmt::format("{:.1f} %", 100.0 * s.accepted_tokens / s.draft_tokens)};
}

void Report::add_md(const Row& row) {
  const eval::BenchResult& r = row.result;
  const double rate = r.tokens_per_s();
  const int digits = rate < 1e3 ? 2 : rate < 1e4 ? 1 : 0;
  const auto [first, second] = drafts_ ? md_drafts(row) : md_limits(row);
  out_.print("| {:{}} | {:>8} | {:>3} | {:{}} | {:>15} | {:>12} | {:>13} |\n",
             shortened(file_name(row.model), columns_.model), columns_.model,
             format_bytes(row.model_bytes), row.threads, r.test.name(), columns_.test,
             fmt::format("{:.{}f} ± {:.{}f}", rate, digits, r.spread(), digits), first, second);
  if (drafts_) return;
  std::string line = fmt::format("{} thread{} on {}: {:.1f} GB/s", row.threads,
                                 row.threads == 1 ? "" : "s", row.backend, row.ceilings.read / 1e9);
  if (row.ceilings.operations > 0.0)
    line += fmt::format(", {:.1f} GOP/s ({})", row.ceilings.operations / 1e9,
                        row.ceilings.operations_name);
  if (std::find(limits_.begin(), limits_.end(), line) == limits_.end()) limits_.push_back(line);
}

void Report::legend() {
  if (drafts_) {
    out_.write(
        "\nthr: threads. tokens/step: of steps with drafts. accepted: share of the drafts.\n");
    return;
  }
  out_.write(
      "\nthr: threads. GB/s: weights and KV cache read. GOP/s: multiplications and additions of "
      "GEMMs.\n"
      "In brackets: the share of what was measured on this machine just now:\n");
  for (const std::string& line : limits_) out_.print("- {}\n", line);
}

Status Report::end() {
  if (format_ == "md" && rows_ > 0) legend();
  if (format_ == "json") out_.write("\n]\n");
  return out_.flush();
}

Status run_plan(const Options& o, const Plan& plan, Report& report, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(plan.model));
  eval::SessionOptions s = session_options(o.run, path);
  s.threads = plan.threads;
  s.load_format = o.load_format;
  s.batch = plan.batch;
  for (const eval::BenchTest& t : plan.tests) {
    s.context = std::max(s.context, t.context());
    s.sequences = std::max(s.sequences, t.sequences);
  }
  s.batch = std::max<int64_t>(s.batch, s.sequences);
  s.logit_rows = s.sequences;
  ProgressLine progress;
  s.on_progress = [&progress](const std::string& stage, double fraction) {
    progress.update(stage, fraction);
  };
  FRESHET_ASSIGN_OR_RETURN(const auto session,
                           open_on_device(o.run, progress, s, eval::Session::open));
  if (const int64_t most = session->model().spec().max_context; s.context > most) {
    progress.clear();
    say(fmt::format(
        "freshet: tests of {} tokens exceed the model's context of {}: only their speed "
        "is meaningful",
        s.context, most));
  }
  Row row;
  row.model = plan.model;
  row.architecture = session->model().spec().architecture;
  row.backend = session->device() == "cpu" ? "CPU" : session->device();
  row.model_bytes = session->weight_bytes();
  row.parameters = eval::model_work(session->model()).parameters;
  row.threads = session->threads();
  row.batch = plan.batch;
  progress.update("measuring the machine's limits", 0.0);
  row.ceilings = eval::measure_ceilings(session->model(), session->threads());
  for (size_t i = 0; i < plan.tests.size(); ++i) {
    int runs = 0;
    const auto goes_on = [&] {
      const double part = std::min(1.0, runs++ / (o.repetitions + 1.0));
      progress.update(plan.tests[i].name(),
                      (static_cast<double>(i) + part) / static_cast<double>(plan.tests.size()));
      return !context.interrupts.requested();
    };
    FRESHET_ASSIGN_OR_RETURN(row.result,
                             eval::run_bench(*session, plan.tests[i], o.repetitions, goes_on));
    progress.clear();
    FRESHET_RETURN_IF_ERROR(report.add(row));
  }
  return {};
}

// With speculation or --engine, tests run as requests to an engine.
Status run_engine(const Options& o, const Plan& plan, Report& report, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(plan.model));
  FRESHET_ASSIGN_OR_RETURN(EngineOptions e, engine_options(o.run, path));
  e.threads = plan.threads;
  e.load_format = o.load_format;
  e.max_num_seqs = 1;
  for (const eval::BenchTest& t : plan.tests) {
    e.max_model_len = std::max(e.max_model_len, static_cast<int>(t.context()) + 2);
    e.max_num_seqs = std::max(e.max_num_seqs, t.sequences);
  }
  e.max_num_batched_tokens = std::max(plan.batch, e.max_num_seqs);
  ProgressLine progress;
  e.on_progress = [&](const std::string& stage, double done) { progress.update(stage, done); };
  FRESHET_ASSIGN_OR_RETURN(const auto engine, open_on_device(o.run, progress, e, Engine::load));
  Row row;
  row.model = plan.model;
  row.architecture = engine->model().spec().architecture;
  row.backend = engine->device() == "cpu" ? "CPU" : engine->device();
  for (const Model::WeightInfo& w : engine->model().weights()) row.model_bytes += w.bytes;
  row.parameters = eval::model_work(engine->model()).parameters;
  row.threads = plan.threads > 0 ? plan.threads : usable_cpus().recommended_threads;
  row.batch = plan.batch;
  for (const eval::BenchTest& test : plan.tests) {
    int runs = 0;
    const auto goes_on = [&] {
      progress.update(test.name(), std::min(1.0, runs++ / (o.repetitions + 1.0)));
      return !context.interrupts.requested();
    };
    FRESHET_ASSIGN_OR_RETURN(eval::EngineBench bench,
                             eval::run_engine_bench(*engine, test, o.repetitions, goes_on));
    row.result = std::move(bench.result);
    row.drafting = bench_client::spec_decode_of(bench.drafting);
    if (engine->max_drafts() > 0) row.gauge = bench.gauge;
    progress.clear();
    FRESHET_RETURN_IF_ERROR(report.add(row));
  }
  return {};
}

Status bench(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const auto plans, plans_of(o));
  for (const Plan& plan : plans) FRESHET_RETURN_IF_ERROR(resolve_model(plan.model).status());
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  FRESHET_ASSIGN_OR_RETURN(const std::string drafter, speculative_config(o.run.speculation));
  const bool engine = o.engine || !drafter.empty();
  Report report(o.json ? "json" : o.format, columns_of(plans), engine, context.out);
  for (const Plan& plan : plans) {
    FRESHET_RETURN_IF_ERROR(engine ? run_engine(o, plan, report, context)
                                   : run_plan(o, plan, report, context));
  }
  return report.end();
}

}  // namespace bench_command

void add_bench(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<bench_command::Options>();
  CLI::App* c = program.add_subcommand(
      "bench", "Measure speed and compare it with the limits of the machine");
  c->add_option("MODEL,-m,--model", o->models,
                "Model folder, .gguf file or name; several are measured one after the other "
                "(default: the embedded model)");
  const auto list = [&](const char* name, std::string& value, const char* about) {
    c->add_option(name, value, about)->capture_default_str();
  };
  list("-p,--n-prompt", o->prompts, "Prompt lengths, comma-separated; 0: none");
  list("-n,--n-gen", o->generates, "Numbers of tokens to generate, comma-separated; 0: none");
  c->add_option("--pg", o->pairs, "PROMPT,GENERATE: both, timed together (also -pg)")
      ->allow_extra_args(false);
  list("-d,--n-depth", o->depths, "Tokens in the KV cache before the test, comma-separated");
  list("-b,--batch-size", o->batches, "Maximum number of prompt tokens per step, comma-separated");
  list("--sequences", o->sequences, "Sequences that generate at the same time, comma-separated");
  c->add_option("-r,--repetitions", o->repetitions, "Repetitions of each test")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  c->add_option("-o,--output", o->format, "md, json or csv")
      ->check(CLI::IsMember({"md", "json", "csv"}))
      ->capture_default_str();
  c->add_flag("--json", o->json, "The same as -o json");
  add_compute_options(*c, o->run);
  add_speculative_options(*c, o->run.speculation);
  c->remove_option(c->get_option("--threads"));
  c->add_option("-t,--threads", o->threads, "Numbers of threads, comma-separated");
  c->add_option("--load-format", o->load_format,
                "auto, or dummy:FORMAT: random weights with the shapes of MODEL/config.json")
      ->capture_default_str();
  c->add_flag("--engine", o->engine,
              "Run tests as requests to an engine, as --speculative-config does: what speculation "
              "is compared with");
  add_mmproj_option(*c, o->run);
  add_examples(*c,
               "  freshet bench smollm2 -p 512,2048 -n 128 -pg 512,128\n"
               "  freshet bench model.gguf -p 0 -n 64 -d 0,4096 -t 1,2 -o json\n"
               "  freshet bench model.gguf -p 0 -n 64 --sequences 1,8,32\n"
               "  freshet bench model/ -p 0 -n 128 --speculative-config '{\"method\": \"ngram\"}'");
  add_bench_ceilings(*c, context, action);
  add_bench_serve(*c, context, action);
  add_bench_throughput(*c, context, action);
  c->callback([o, c, &context, &action] {
    if (!c->get_subcommands().empty()) return;  // the subcommand has set the action
    action = [o, &context] { return bench(*o, context); };
  });
}

}  // namespace freshet::cli

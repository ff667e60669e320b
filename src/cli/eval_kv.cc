// `freshet eval kv`: what a model loses with other types of keys and values.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/ranges.h>

#include "base/json.h"
#include "cli/command.h"
#include "cli/eval_texts.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "eval/kv_quality.h"

namespace freshet::cli {
namespace eval_kv_command {

struct Options {
  std::string model;
  std::vector<std::string> texts;
  int64_t max_chars = 0;
  eval::KvQualityOptions eval;
  bool json = false;
  RunOptions run;
};

Status eval_kv(const Options& o, Context& context) {
  if (o.run.kv_cache_dtype != "auto") {
    return invalid_argument("--kv-cache-dtype {}: eval kv takes types as --policies",
                            o.run.kv_cache_dtype);
  }
  eval::KvQualityOptions e = o.eval;
  FRESHET_ASSIGN_OR_RETURN(e.texts, read_texts(o.texts, o.max_chars));
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  e.name = o.model;
  e.session = session_options(o.run, path);
  ProgressLine progress;
  e.session.on_progress = [&](const std::string& stage, double done) {
    progress.update(stage, done);
  };
  e.open = [&](const eval::SessionOptions& s) {
    return open_on_device(o.run, progress, s, eval::Session::open);
  };
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  FRESHET_ASSIGN_OR_RETURN(const eval::KvQuality q, eval::kv_quality(e, [&](double done) {
                             progress.update("comparing", done);
                             return !context.interrupts.requested();
                           }));
  progress.clear();
  context.out.write(o.json ? json::write(json::Value(eval::kv_quality_json(q))) + "\n"
                           : eval::kv_quality_text(q));
  return {};
}

}  // namespace eval_kv_command

void add_eval_kv(CLI::App& eval, Context& context, Action& action) {
  auto o = std::make_shared<eval_kv_command::Options>();
  o->eval.policies = {"f16", "int8", "fp8", "k8v4", "int4"};
  o->eval.windows = {512, 2048, 8192};
  CLI::App* c =
      eval.add_subcommand("kv", "Measure what a model loses with smaller types of keys and values");
  c->add_option("model", o->model, "Model folder, .gguf file or name")->required();
  c->add_option("text", o->texts, "Text files, each a document of its own")->required();
  std::vector<std::string_view> names;
  for (const eval::KvPolicy& p : eval::kv_policies()) names.push_back(p.name);
  c->add_option(
       "--policies", o->eval.policies,
       fmt::format("What to compare: {}; what reads a part of an f16 cache: quest-N and "
                   "sparq-N[-FEATURES], N tokens, and static-WINDOW[-SINKS[-STRIDE]]; and what "
                   "evicts from one, as --kv-eviction does: POLICY-BUDGET[-INTERVAL], mikv-512",
                   fmt::join(names, ", ")))
      ->delimiter(',')
      ->capture_default_str();
  c->add_option("--base", o->eval.base, "What to compare with")->capture_default_str();
  c->add_option("--windows", o->eval.windows,
                "Tokens per window, one after the other; what the model's context or the texts do "
                "not fill is left out")
      ->delimiter(',')
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  c->add_option("--max-chars", o->max_chars, "Use only the first N characters of the texts")
      ->check(not_negative());
  c->add_option("--batch", o->eval.batch, "Windows per batch")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  c->add_flag("--json", o->json, "Print a JSON object: lengths, policies, kl_divergence ...");
  add_compute_options(*c, o->run);
  add_examples(*c,
               "  freshet eval kv smollm2 book.txt --windows 512 --max-chars 100000\n"
               "  freshet eval kv model/ book.txt --policies f16,int4 --json");
  c->callback([o, &context, &action] { action = [o, &context] { return eval_kv(*o, context); }; });
}

}  // namespace freshet::cli

// `freshet eval compare`: what a model loses against its base, on the same text.
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/command.h"
#include "cli/comparer.h"
#include "cli/eval_texts.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "eval/compare.h"

namespace freshet::cli {
namespace eval_compare_command {

struct Options {
  std::string base;
  std::string model;
  std::vector<std::string> texts;
  int64_t max_chars = 0;
  eval::Comparer::Options eval;
  bool json = false;
  RunOptions run;
};

Status eval_compare(const Options& o, Context& context) {
  eval::Comparer::Options e = o.eval;
  FRESHET_ASSIGN_OR_RETURN(e.texts, read_texts(o.texts, o.max_chars));
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  ProgressLine progress;
  FRESHET_ASSIGN_OR_RETURN(auto comparer, open_comparer(std::move(e), o.base, o.run, progress));
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  eval::SessionOptions model = session_options(o.run, path);
  model.on_progress = [&](const std::string& stage, double done) { progress.update(stage, done); };
  FRESHET_ASSIGN_OR_RETURN(const eval::ModelComparison c,
                           comparer.compare_with(model, o.model, [&](double done) {
                             progress.update("comparing", done);
                             return !context.interrupts.requested();
                           }));
  progress.clear();
  context.out.write(o.json ? json::write(json::Value(eval::comparison_json(c))) + "\n"
                           : eval::comparison_text(c));
  return {};
}

}  // namespace eval_compare_command

void add_eval_compare(CLI::App& eval, Context& context, Action& action) {
  auto o = std::make_shared<eval_compare_command::Options>();
  CLI::App* c = eval.add_subcommand("compare", "Measure what a model loses against its base");
  c->add_option("base", o->base, "Model folder, .gguf file or name: what it was made from")
      ->required();
  c->add_option("model", o->model, "Model folder, .gguf file or name with the same vocabulary")
      ->required();
  c->add_option("text", o->texts, "Text files, each a document of its own")->required();
  c->add_option("--window", o->eval.window,
                "Tokens per window; each window starts with a BOS token")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  c->add_option("--max-chars", o->max_chars, "Use only the first N characters of the texts")
      ->check(not_negative());
  c->add_option("--batch", o->eval.batch, "Windows per batch")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  c->add_flag("--json", o->json,
              "Print a JSON object: delta_nats_per_token, kl_divergence, bits_per_weight ...");
  add_compute_options(*c, o->run);
  add_examples(*c,
               "  freshet eval compare model/ model-q4_0.gguf book.txt\n"
               "  freshet eval compare model/ quantised/ a.txt b.txt --max-chars 100000 --json");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return eval_compare(*o, context); }; });
}

}  // namespace freshet::cli

// `freshet eval speculation`: what a drafter gives for a model and a text.
#include <memory>
#include <string>

#include "base/json.h"
#include "base/mapped_file.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "eval/speculation.h"

namespace freshet::cli {
namespace eval_speculation_command {

struct Options {
  std::string model;
  std::string text;
  eval::SpeculationOptions eval;
  int64_t seed = 0;
  bool json = false;
  RunOptions run;
};

Status eval_speculation(const Options& o, Context& context) {
  eval::SpeculationOptions e = o.eval;
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(o.text));
  e.text.assign(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(e.engine, engine_options(o.run, path));
  if (e.engine.speculative_config.empty()) {
    return invalid_argument(
        "--speculative-config is missing; write e.g. --speculative-config "
        "'{{\"method\": \"ngram\"}}'");
  }
  e.seed = static_cast<uint64_t>(o.seed);
  ProgressLine progress;
  e.progress = [&](const std::string& stage, double done) { progress.update(stage, done); };
  e.engine.on_progress = e.progress;
  e.load = [&](const EngineOptions& engine) {
    return open_on_device(o.run, progress, engine, Engine::load);
  };
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  e.stop = &context.interrupts.requested();
  FRESHET_ASSIGN_OR_RETURN(const eval::SpeculationResult result, eval::evaluate_speculation(e));
  progress.clear();
  context.out.write(o.json ? json::write(json::Value(eval::speculation_json(result))) + "\n"
                           : eval::speculation_text(result));
  if (result.equal || result.may_differ) return {};
  return internal_error("the tokens of prompt {} differ from plain decoding",
                        result.first_different);
}

}  // namespace eval_speculation_command

void add_eval_speculation(CLI::App& eval, Context& context, Action& action) {
  auto o = std::make_shared<eval_speculation_command::Options>();
  CLI::App* c = eval.add_subcommand(
      "speculation", "Compare decoding with and without a drafter; find a head's wiring");
  c->add_option("model", o->model, "Model folder, .gguf file or name")->required();
  c->add_option("--text", o->text, "A text file, from which prompts are taken")->required();
  const auto number = [&](const char* name, int& value, int low, int high, const char* about) {
    c->add_option(name, value, about)->check(CLI::Range(low, high))->capture_default_str();
  };
  number("--prompts", o->eval.prompts, 1, 4096, "Number of prompts");
  number("--prompt-tokens", o->eval.prompt_tokens, 2, 1 << 20, "Tokens per prompt");
  number("--max-tokens", o->eval.max_tokens, 2, 1 << 20, "Tokens to generate per prompt");
  number("--clients", o->eval.clients, 1, 1024, "Requests at the same time");
  number("--turns", o->eval.turns, 1, 1000, "Turns with and without the drafter, for medians");
  c->add_option("--temp,--temperature", o->eval.temperature, "Sampling temperature; 0: greedy")
      ->check(not_negative())
      ->capture_default_str();
  c->add_option("--seed", o->seed, "Seed of the first prompt; each next one adds 1")
      ->check(not_negative())
      ->capture_default_str();
  c->add_flag("--json", o->json, "Print a JSON object: equal, acceptance_length, speedup ...");
  add_engine_options(*c, o->run);
  add_examples(*c,
               "  freshet eval speculation model/ --text book.txt \\\n"
               "      --speculative-config '{\"method\": \"draft_model\", \"model\": \"small/\"}'");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return eval_speculation(*o, context); }; });
}

}  // namespace freshet::cli

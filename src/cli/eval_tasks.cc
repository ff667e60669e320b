// `freshet eval tasks`: how many items of task files a model gets right.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "cli/command.h"
#include "cli/eval_texts.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "eval/tasks.h"

namespace freshet::cli {
namespace eval_tasks_command {

struct Options {
  std::string model;
  std::vector<std::string> files;
  std::string base;
  std::string preamble;
  std::string items;
  eval::TaskDefaults defaults;
  bool chat = false;
  int batch = 8;
  bool json = false;
  RunOptions run;
};

// Logits rows at once, of all items of a batch.
constexpr int64_t kTaskRows = 512;

using Results = std::vector<std::vector<eval::ItemResult>>;  // [files]

// Runs the files on one model.
class ModelRun {
 public:
  ModelRun(const Options& o, const std::vector<eval::TaskFile>& files, Context& context)
      : o_(o), files_(files), context_(context) {}

  Result<Results> run(const std::string& name) {
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(name));
    FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(path));
    eval::TaskPrompts prompts{tokenizer, nullptr};
    std::optional<tokenizer::ChatRenderer> renderer;
    if (o_.chat) {
      FRESHET_ASSIGN_OR_RETURN(renderer, tokenizer::ChatRenderer::make(tokenizer, {}));
      if (renderer->empty())
        return invalid_argument("{} has no chat template: leave out --chat", name);
      prompts.chat = &*renderer;
    }
    Results results(files_.size());
    FRESHET_RETURN_IF_ERROR(choices(name, path, prompts, results));
    FRESHET_RETURN_IF_ERROR(answers(name, path, prompts, results));
    progress_.clear();
    return results;
  }

 private:
  Status choices(const std::string& name, const std::string& path, const eval::TaskPrompts& prompts,
                 Results& results) {
    int64_t longest = 0;
    for (const eval::TaskFile& file : files_) {
      if (!file.choices) continue;
      auto length = eval::longest_choice(file, prompts);
      if (!length.ok()) return length.status().with_context(file.name);
      longest = std::max(longest, *length);
    }
    if (longest == 0) return {};
    FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, eval::Session::read_spec(path));
    if (spec.max_context > 0 && longest > spec.max_context) {
      return invalid_argument("an item has {} tokens, and {} handles {}", longest, name,
                              spec.max_context);
    }
    eval::SessionOptions s = session_options(o_.run, path);
    s.sequences = o_.batch;
    s.context = longest;
    s.batch = s.logit_rows = kTaskRows;
    s.on_progress = loading();
    FRESHET_ASSIGN_OR_RETURN(const auto session,
                             open_on_device(o_.run, progress_, s, eval::Session::open));
    for (size_t i = 0; i < files_.size(); ++i) {
      if (!files_[i].choices) continue;
      FRESHET_ASSIGN_OR_RETURN(
          results[i], eval::score_choices(*session, files_[i], prompts, running(files_[i].name)));
    }
    return {};
  }

  Status answers(const std::string&, const std::string& path, const eval::TaskPrompts& prompts,
                 Results& results) {
    if (std::ranges::all_of(files_, [](const eval::TaskFile& f) { return f.choices; })) return {};
    FRESHET_ASSIGN_OR_RETURN(EngineOptions e, engine_options(o_.run, path));
    e.on_progress = loading();
    FRESHET_ASSIGN_OR_RETURN(const auto engine, open_on_device(o_.run, progress_, e, Engine::load));
    for (size_t i = 0; i < files_.size(); ++i) {
      if (files_[i].choices) continue;
      FRESHET_ASSIGN_OR_RETURN(
          results[i], eval::generate_answers(*engine, files_[i], prompts, running(files_[i].name)));
    }
    return {};
  }

  std::function<void(const std::string&, double)> loading() {
    return [this](const std::string& stage, double done) { progress_.update(stage, done); };
  }
  eval::TaskProgress running(const std::string& file) {
    return [this, file](double done) {
      progress_.update(file, done);
      return !context_.interrupts.requested();
    };
  }

  const Options& o_;
  const std::vector<eval::TaskFile>& files_;
  Context& context_;
  ProgressLine progress_;
};

Status write_items(const Options& o, const std::vector<eval::TaskFile>& files,
                   const Results& results) {
  if (o.items.empty()) return {};
  std::string lines;
  for (size_t f = 0; f < files.size(); ++f) {
    for (size_t i = 0; i < results[f].size(); ++i)
      lines += json::write(json::Value(eval::item_json(files[f], i, results[f][i]))) + "\n";
  }
  return write_text_file(o.items, lines);
}

Status eval_tasks(const Options& o, Context& context) {
  eval::TaskDefaults defaults = o.defaults;
  if (!o.preamble.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const auto text, read_texts({o.preamble}, 0));
    defaults.preamble = text.front();
  }
  std::vector<eval::TaskFile> files;
  for (const std::string& name : o.files) {
    FRESHET_ASSIGN_OR_RETURN(files.emplace_back(), eval::read_task_file(name, defaults));
  }
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  ModelRun run(o, files, context);
  Results base(files.size());
  if (!o.base.empty()) {
    FRESHET_ASSIGN_OR_RETURN(base, run.run(o.base));
  }
  FRESHET_ASSIGN_OR_RETURN(const Results results, run.run(o.model));
  FRESHET_RETURN_IF_ERROR(write_items(o, files, results));
  json::Array tasks;
  for (size_t i = 0; i < files.size(); ++i) {
    json::Object task = eval::task_json(files[i], results[i], base[i]);
    if (!o.json) context.out.write(eval::task_text(task));
    tasks.emplace_back(std::move(task));
  }
  if (!o.json) return {};
  json::Object all;
  all["model"] = o.model;
  if (!o.base.empty()) all["base"] = o.base;
  all["tasks"] = std::move(tasks);
  context.out.write(json::write(json::Value(std::move(all))) + "\n");
  return {};
}

}  // namespace eval_tasks_command

void add_eval_tasks(CLI::App& eval, Context& context, Action& action) {
  auto o = std::make_shared<eval_tasks_command::Options>();
  CLI::App* c = eval.add_subcommand(
      "tasks", "Count right answers to multiple-choice and exact-match items of JSONL files");
  c->add_option("model", o->model, "Model folder, .gguf file or name")->required();
  c->add_option("file", o->files,
                "JSONL files: lines with prompt, choices and answer; with prompt and answer; or of "
                "GSM8K")
      ->required();
  c->add_option("--base", o->base, "A model to compare with, item by item (McNemar's test)");
  c->add_option("--preamble-file", o->preamble, "A text put before each prompt, such as examples");
  c->add_flag("--chat", o->chat, "Render each prompt as a user's message with the chat template");
  c->add_option("--limit", o->defaults.limit, "Use only the first N items of each file")
      ->check(not_negative());
  c->add_option("--max-tokens", o->defaults.max_tokens, "Tokens to generate for an exact match")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  c->add_option("--stop", o->defaults.stop, "A text that ends a generated answer; may be repeated")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  c->add_option("--extract", o->defaults.extract,
                "The part of a generated text that counts: text, number (as for GSM8K), or a "
                "regular expression, whose last match counts")
      ->capture_default_str();
  c->add_option("--batch", o->batch, "Multiple-choice items per batch")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  c->add_option("--items-file", o->items, "Write the result of each item to this JSONL file");
  c->add_flag("--json", o->json, "Print a JSON object: acc, acc_norm, exact_match ...");
  add_engine_options(*c, o->run);
  add_examples(*c,
               "  freshet eval tasks model-q4_0.gguf arc.jsonl --base model/ --json\n"
               "  freshet eval tasks model/ gsm8k.jsonl --preamble-file examples.txt --limit 200");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return eval_tasks(*o, context); }; });
}

}  // namespace freshet::cli

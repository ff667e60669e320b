#include <algorithm>
#include <memory>
#include <string>

#include "base/json.h"
#include "base/mapped_file.h"
#include "cli/command.h"
#include "cli/eval_texts.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/prompts.h"
#include "eval/logits.h"
#include "eval/safetensors_writer.h"
#include "eval/session.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {
namespace eval_command {

// Rows of logits in memory at once: enough for efficient GEMMs, little compared with a model.
constexpr int64_t kRows = 128;

struct Options {
  std::string model;
  std::string input;
  std::string output;
  int64_t window = 512;
  int64_t max_chars = 0;
  int batch = 4;
  bool json = false;
  RunOptions run;
};

struct Sizes {
  int sequences;
  int64_t context;
  int64_t batch;
  int64_t logit_rows;
};

Result<std::unique_ptr<eval::Session>> open(const Options& o, const Sizes& sizes) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  eval::SessionOptions s = session_options(o.run, path);
  s.sequences = sizes.sequences;
  s.context = sizes.context;
  s.batch = sizes.batch;
  s.logit_rows = sizes.logit_rows;
  ProgressLine progress;
  s.on_progress = [&progress](const std::string& stage, double fraction) {
    progress.update(stage, fraction);
  };
  return open_on_device(o.run, progress, s, eval::Session::open);
}

Status eval_logits(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const auto lists, read_ids(o.input));
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, eval::Session::read_spec(path));
  std::vector<eval::SafetensorsWriter::Entry> entries;
  int64_t longest = 0, tokens = 0;
  for (size_t i = 0; i < lists.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(eval::check_ids(lists[i], spec.vocab_size)
                                .with_context(fmt::format("{}, list {}", o.input, i)));
    entries.push_back({fmt::format("logits_{}", i), {std::ssize(lists[i]), spec.vocab_size}});
    longest = std::max(longest, std::ssize(lists[i]));
    tokens += std::ssize(lists[i]);
  }
  FRESHET_ASSIGN_OR_RETURN(
      const auto session,
      open(o, {.sequences = 1, .context = longest, .batch = kRows, .logit_rows = kRows}));
  FRESHET_ASSIGN_OR_RETURN(auto writer, eval::SafetensorsWriter::create(o.output, entries));
  const Interrupts::Handler on_interrupt(context.interrupts, [] {});
  ProgressLine progress;
  int64_t done = 0;
  for (const auto& ids : lists) {
    FRESHET_RETURN_IF_ERROR(
        eval::each_logits(*session, ids, [&](int64_t, std::span<const float> row) -> Status {
          if (context.interrupts.requested()) return cancelled("interrupted");
          progress.update("computing logits",
                          static_cast<double>(++done) / static_cast<double>(tokens));
          return writer.write(row);
        }));
  }
  progress.clear();
  FRESHET_RETURN_IF_ERROR(writer.close());
  if (o.json) {
    json::Object result;
    result["sequences"] = lists.size();
    result["tokens"] = tokens;
    result["vocab_size"] = spec.vocab_size;
    result["output"] = o.output;
    context.out.write(json::write(json::Value(std::move(result))) + "\n");
  }
  return {};
}

Status eval_perplexity(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(o.input));
  std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  if (o.max_chars > 0) text = first_characters(text, o.max_chars);
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(path));
  const auto ids = tokenizer.encode(text, {.add_special = false});
  eval::PerplexityOptions options;
  options.window = o.window;
  options.bos = tokenizer.bos().value_or(-1);
  FRESHET_ASSIGN_OR_RETURN(const auto session, open(o, {.sequences = o.batch,
                                                        .context = o.window + 1,
                                                        .batch = kRows * o.batch,
                                                        .logit_rows = kRows * o.batch}));
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  ProgressLine progress;
  FRESHET_ASSIGN_OR_RETURN(const eval::Perplexity p,
                           eval::perplexity(*session, ids, options, [&](double fraction) {
                             progress.update("scoring", fraction);
                             return !context.interrupts.requested();
                           }));
  progress.clear();
  if (!o.json) {
    context.out.print(
        "{:.4f} +- {:.4f} nats per token (perplexity {:.3f}) over {} tokens in {} windows of {}\n",
        p.nats_per_token, p.standard_error, std::exp(p.nats_per_token), p.tokens, p.windows,
        o.window);
    return {};
  }
  json::Object result;
  result["nats_per_token"] = p.nats_per_token;
  result["standard_error"] = p.standard_error;
  result["perplexity"] = std::exp(p.nats_per_token);
  result["tokens"] = p.tokens;
  result["windows"] = p.windows;
  result["window"] = o.window;
  context.out.write(json::write(json::Value(std::move(result))) + "\n");
  return {};
}

}  // namespace eval_command

void add_eval(CLI::App& program, Context& context, Action& action) {
  CLI::App* c =
      program.add_subcommand("eval", "Evaluate a model: perplexity, loss of quantisation, tasks");
  c->require_subcommand(1);

  auto l = std::make_shared<eval_command::Options>();
  CLI::App* logits = c->add_subcommand("logits", "Write the logits at every position of id lists");
  logits->add_option("model", l->model, "Model folder, .gguf file or name")->required();
  logits->add_option("--ids", l->input, "A JSON file with a list of lists of token ids")
      ->required();
  logits
      ->add_option("-o,--output", l->output,
                   "The .safetensors file to write: logits_i [tokens, vocabulary], F32")
      ->required();
  logits->add_flag("--json", l->json, "Print what was written as JSON");
  add_compute_options(*logits, l->run);
  add_examples(*logits,
               "  freshet eval logits model/ --ids ids.json -o logits.safetensors --reference");
  logits->callback(
      [l, &context, &action] { action = [l, &context] { return eval_logits(*l, context); }; });

  auto p = std::make_shared<eval_command::Options>();
  CLI::App* perplexity =
      c->add_subcommand("perplexity", "Measure how well a model predicts a text");
  perplexity->add_option("model", p->model, "Model folder, .gguf file or name")->required();
  perplexity->add_option("file", p->input, "The text file")->required();
  perplexity
      ->add_option("--window", p->window, "Tokens per window; each window starts with a BOS token")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  perplexity->add_option("--max-chars", p->max_chars, "Use only the first N characters of the text")
      ->check(not_negative());
  perplexity->add_option("--batch", p->batch, "Windows per batch")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  perplexity->add_flag("--json", p->json, "Print a JSON object: nats_per_token ...");
  add_compute_options(*perplexity, p->run);
  add_examples(*perplexity,
               "  freshet eval perplexity smollm2 book.txt --window 512 --max-chars 60000 --json");
  perplexity->callback(
      [p, &context, &action] { action = [p, &context] { return eval_perplexity(*p, context); }; });
  add_eval_compare(*c, context, action);
  add_eval_kv(*c, context, action);
  add_eval_quant(*c, context, action);
  add_eval_tasks(*c, context, action);
  add_eval_speculation(*c, context, action);
}

}  // namespace freshet::cli

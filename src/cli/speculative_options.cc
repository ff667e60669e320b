#include "cli/speculative_options.h"

#include "base/json.h"
#include "base/log.h"
#include "cli/model_path.h"
#include "speculative/config.h"

namespace freshet::cli {

void add_speculative_options(CLI::App& c, SpeculativeOptions& o) {
  const std::string group = "Speculative decoding";
  c.add_option(
       "--speculative-config", o.config,
       "JSON with vLLM's keys, e.g. '{\"method\": \"ngram\"}' (docs/speculation.md). The output "
       "stays the same, unless rejection_sample_method is rejection or block (same "
       "distribution), typical (lossy) or synthetic (meaningless)")
      ->group(group);
  c.add_option("--spec-draft-model,--model-draft,--draft-model", o.draft_model,
               "A small model with the same vocabulary that proposes tokens (method draft_model)")
      ->group(group);
  c.add_option("--spec-draft-n-max,--draft-max,--draft-n", o.max_drafts,
               "Most drafted tokens per step (num_speculative_tokens)")
      ->check(CLI::Range(1, 63))
      ->group(group);
}

Result<std::string> speculative_config(const SpeculativeOptions& o) {
  if (o.config.empty() && o.draft_model.empty()) {
    if (o.max_drafts > 0) {
      return invalid_argument(
          "--spec-draft-n-max needs --spec-draft-model or --speculative-config");
    }
    return std::string();
  }
  json::Object config;
  if (!o.config.empty()) {
    auto given = json::parse(o.config);
    if (!given.ok() || !given->is_object()) return o.config;  // the engine says what is wrong
    config = std::move(given->as_object());
  }
  if (!o.draft_model.empty()) {
    if (config.find("model") != nullptr) {
      return invalid_argument("--spec-draft-model and \"model\" in --speculative-config: give one");
    }
    config["model"] = o.draft_model;
    if (config.find("method") == nullptr) config["method"] = "draft_model";
  }
  if (o.max_drafts > 0) config["num_speculative_tokens"] = o.max_drafts;
  if (const json::Value* model = config.find("model"); model != nullptr && model->is_string()) {
    FRESHET_ASSIGN_OR_RETURN(config["model"], resolve_model(std::string(model->as_string())));
  }
  std::string text = json::write(json::Value(std::move(config)));
  auto read = speculative::parse_config(text);
  if (!read.ok()) read = speculative::parse_config(text, true);
  if (read.ok() && read->acceptance.method == Acceptance::kSynthetic) {
    log_warning(
        "rejection_sample_method synthetic keeps drafts whatever they are: the text is "
        "meaningless, use it for measurements only");
  }
  return text;
}

}  // namespace freshet::cli

// `freshet eval quant`: the models that were made from one base, compared and drawn.
#include <cmath>
#include <filesystem>
#include <map>
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
#include "eval/pareto_plot.h"

namespace freshet::cli {
namespace eval_quant_command {

struct Options {
  std::string base;
  std::vector<std::string> models;
  std::vector<std::string> texts;
  std::string output;
  std::string x = "bits";
  std::string y = "kld";
  int64_t max_chars = 0;
  eval::Comparer::Options eval;
  bool json = false;
  RunOptions run;
};

// The last part of a path, without the ending of its kind; the whole name if two would be equal.
std::vector<std::string> short_names(const std::vector<std::string>& names) {
  std::vector<std::string> shorter;
  std::map<std::string, int> uses;
  for (const std::string& name : names) {
    std::filesystem::path path(name);
    if (!path.has_filename()) path = path.parent_path();
    const bool ends = path.extension() == ".gguf" || path.extension() == ".json";
    shorter.push_back(ends ? path.stem().string() : path.filename().string());
    ++uses[shorter.back()];
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (uses[shorter[i]] > 1) shorter[i] = names[i];
  }
  return shorter;
}

Status another_protocol(const std::string& name, const std::string& what) {
  return invalid_argument("{} was measured {}: measure it again with these options", name, what);
}

// What `eval compare --json` printed earlier.
Result<json::Object> saved_result(const std::string& name) {
  FRESHET_ASSIGN_OR_RETURN(json::Value value, json::parse_file(name));
  for (const char* key : {"kl_divergence", "delta_nats_per_token", "bits_per_weight",
                          "bits_per_weight_total", "bytes", "base_nats_per_token"}) {
    const json::Value* number = value.find(key);
    if (number == nullptr || !number->is_number())
      return invalid_argument("{} is no output of eval compare --json: \"{}\" is missing", name,
                              key);
  }
  return std::move(value.as_object());
}

// Results of one protocol: the same windows, arithmetic and base.
Status check_protocol(const std::string& name, const json::Object& result,
                      const eval::TextWindows& windows, const json::Object& first) {
  const json::Value value(result), other(first);
  if (value.get_string("windows_hash", "") != windows.fingerprint())
    return another_protocol(name, "on other windows of text");
  const std::string arithmetic = other.get_string("arithmetic", "");
  if (value.get_string("arithmetic", "") != arithmetic)
    return another_protocol(name, fmt::format("in other arithmetic than ({})", arithmetic));
  const double base = other.get_double("base_nats_per_token", 0.0);
  if (std::abs(value.get_double("base_nats_per_token", 0.0) - base) > 1e-9)
    return another_protocol(name,
                            fmt::format("against another base than that of {:.6f} nats", base));
  return {};
}

eval::PlotLabels labels_of(const Options& o, const eval::TextWindows& windows) {
  eval::PlotLabels labels;
  labels.title = fmt::format("{}: {} tokens in windows of up to {}", short_names({o.base}).front(),
                             windows.ids.size(), windows.window);
  labels.size = o.x == "bytes"   ? "MiB"
                : o.x == "total" ? "bits per weight, all tensors"
                                 : "bits per weight, linear layers";
  labels.loss = o.y == "kld" ? "KL divergence, nats per token" : "loss, nats per token";
  return labels;
}

eval::PlotPoint point_of(const Options& o, const std::string& name, const json::Object& result) {
  const json::Value value(result);
  const char* const size = o.x == "bytes"   ? "bytes"
                           : o.x == "total" ? "bits_per_weight_total"
                                            : "bits_per_weight";
  const double unit = o.x == "bytes" ? 1024.0 * 1024.0 : 1.0;
  return {name, value.get_double(size, 0.0) / unit,
          value.get_double(o.y == "kld" ? "kl_divergence" : "delta_nats_per_token", 0.0)};
}

std::string table_of(const std::vector<std::string>& names, const json::Array& results) {
  std::string text = fmt::format("{:<32} {:>7} {:>7} {:>10} {:>9} {:>10} {:>7}  {}\n", "model",
                                 "bits", "in all", "delta", "+-", "KLD", "top-1", "front");
  for (size_t i = 0; i < names.size(); ++i) {
    const json::Value& r = results[i];
    text += fmt::format(
        "{:<32} {:>7.3f} {:>7.3f} {:>+10.5f} {:>9.5f} {:>10.6f} {:>6.2f}%  {}\n", names[i],
        r.get_double("bits_per_weight", 0.0), r.get_double("bits_per_weight_total", 0.0),
        r.get_double("delta_nats_per_token", 0.0), r.get_double("standard_error", 0.0),
        r.get_double("kl_divergence", 0.0), 100.0 * r.get_double("top1_agreement", 0.0),
        r.get_bool("pareto", false) ? "*" : "");
  }
  return text;
}

// The results of all models, in their order.
Result<std::vector<json::Object>> measure(const Options& o, Context& context,
                                          eval::Comparer& comparer, ProgressLine& progress) {
  std::vector<json::Object> results(o.models.size());
  std::vector<size_t> order;  // models first: they tell the arithmetic and the base
  for (const bool saved : {false, true}) {
    for (size_t i = 0; i < o.models.size(); ++i) {
      if (o.models[i].ends_with(".json") == saved) order.push_back(i);
    }
  }
  for (const size_t i : order) {
    const std::string& name = o.models[i];
    if (name.ends_with(".json")) {
      FRESHET_ASSIGN_OR_RETURN(results[i], saved_result(name));
      FRESHET_RETURN_IF_ERROR(
          check_protocol(name, results[i], comparer.windows(), results[order.front()]));
      continue;
    }
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(name));
    eval::SessionOptions model = session_options(o.run, path);
    model.on_progress = [&](const std::string& stage, double done) {
      progress.update(stage, done);
    };
    FRESHET_ASSIGN_OR_RETURN(const eval::ModelComparison c,
                             comparer.compare_with(model, name, [&](double done) {
                               progress.update(name, done);
                               return !context.interrupts.requested();
                             }));
    results[i] = eval::comparison_json(c);
  }
  return results;
}

Status eval_quant(const Options& o, Context& context) {
  eval::Comparer::Options e = o.eval;
  FRESHET_ASSIGN_OR_RETURN(e.texts, read_texts(o.texts, o.max_chars));
  ProgressLine progress;
  FRESHET_ASSIGN_OR_RETURN(auto comparer, open_comparer(std::move(e), o.base, o.run, progress));
  const Interrupts::Handler on_interrupt(context.interrupts, [] {}, Interrupts::kPatience);
  FRESHET_ASSIGN_OR_RETURN(const auto measured, measure(o, context, comparer, progress));
  progress.clear();
  const std::vector<std::string> names = short_names(o.models);
  std::vector<eval::PlotPoint> points;
  json::Array results;
  for (size_t i = 0; i < measured.size(); ++i) {
    points.push_back(point_of(o, names[i], measured[i]));
    json::Object result = measured[i];
    result["name"] = names[i];
    result["pareto"] = false;
    results.emplace_back(std::move(result));
  }
  for (const size_t i : eval::pareto_front(points)) results[i].as_object()["pareto"] = true;
  if (!o.output.empty()) {
    FRESHET_RETURN_IF_ERROR(
        write_text_file(o.output, eval::pareto_svg(points, labels_of(o, comparer.windows()))));
  }
  if (!o.json) {
    context.out.write(table_of(names, results));
    return {};
  }
  json::Object all;
  all["base"] = o.base;
  all["models"] = std::move(results);
  if (!o.output.empty()) all["output"] = o.output;
  context.out.write(json::write(json::Value(std::move(all))) + "\n");
  return {};
}

}  // namespace eval_quant_command

void add_eval_quant(CLI::App& eval, Context& context, Action& action) {
  auto o = std::make_shared<eval_quant_command::Options>();
  CLI::App* c = eval.add_subcommand(
      "quant", "Compare all models made from one base, and draw size against loss");
  c->add_option("base", o->base, "Model folder, .gguf file or name: what they were made from")
      ->required();
  c->add_option("model", o->models,
                "Models with the same vocabulary, or .json files that eval compare --json printed")
      ->required();
  c->add_option("--text", o->texts, "Text file, a document of its own; may be repeated")
      ->required()
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  c->add_option("-o,--output", o->output, "The .svg file to write");
  c->add_option("--x", o->x, "Size: bits per weight of the linear layers, of all, or bytes")
      ->check(CLI::IsMember({"bits", "total", "bytes"}))
      ->capture_default_str();
  c->add_option("--y", o->y, "Loss: KL divergence, or difference in nats per token")
      ->check(CLI::IsMember({"kld", "delta"}))
      ->capture_default_str();
  c->add_option("--window", o->eval.window,
                "Tokens per window; each window starts with a BOS token")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  c->add_option("--max-chars", o->max_chars, "Use only the first N characters of the texts")
      ->check(not_negative());
  c->add_option("--batch", o->eval.batch, "Windows per batch")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  c->add_flag("--json", o->json, "Print a JSON object: models, each as eval compare prints it");
  add_compute_options(*c, o->run);
  add_examples(*c,
               "  freshet eval quant model/ q8.gguf q4.gguf gptq/ --text book.txt -o plot.svg\n"
               "  freshet eval quant model/ q4.gguf earlier.json --text book.txt --x bytes --json");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return eval_quant(*o, context); }; });
}

}  // namespace freshet::cli

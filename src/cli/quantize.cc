#include "quantizer/quantize.h"

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/heap.h"
#include "base/json.h"
#include "base/log.h"
#include "base/units.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/quantize_loss.h"
#include "cli/recipe_options.h"
#include "quantizer/calibration/windows.h"
#include "quantizer/containers/checkpoint_writer.h"
#include "quantizer/containers/scheme.h"

namespace freshet::cli {
namespace quantize_command {

struct Options {
  std::string model;
  std::string output;
  std::string scheme;
  std::string method;
  std::string format;
  std::string calibration;
  quantizer::WindowOptions windows;
  std::string memory = "1GiB";
  std::vector<std::string> ignore;
  std::string kv_cache_scheme;
  float outlier_threshold = 0.0f;  // 0: the scheme's
  RecipeArguments recipe;
  std::string name;
  std::string device = "cpu";
  std::string cpu_isa;
  int threads = 0;
  std::vector<std::string> evaluate;
  double max_loss = 0.0;  // nats per token; 0: any
  bool force = false;
  bool json = false;
};

// What --scheme and --format ask for.
struct Choice {
  std::optional<quantizer::Recipe> recipe;
  const quantizer::Container* container = nullptr;
  quantizer::Scheme scheme;
};

Status only_for_outliers() {
  return invalid_argument("--outlier-threshold is for --scheme LLM_INT8_OUTLIERS");
}

Result<Choice> choose(const Options& o) {
  Choice c;
  const bool gguf = o.format == "gguf";
  if (o.format.empty() || gguf) {
    auto recipe = quantizer::Recipe::by_name(o.scheme);
    if (recipe.ok() && o.outlier_threshold > 0.0f) return only_for_outliers();
    if (recipe.ok()) {
      c.recipe = std::move(*recipe);
      return c;
    }
    if (gguf) return recipe.status().with_context("--scheme");
  }
  auto scheme = quantizer::scheme_by_name(o.scheme);
  if (!scheme.ok()) {
    return invalid_argument("--scheme {}: {}; or a type of GGUF files: {}", o.scheme,
                            scheme.status().message(), quantizer::Recipe::names());
  }
  c.scheme = std::move(*scheme);
  if (o.outlier_threshold > 0.0f) {
    if (c.scheme.outlier_threshold <= 0.0f) return only_for_outliers();
    c.scheme.outlier_threshold = o.outlier_threshold;
  }
  if (o.format.empty()) {
    FRESHET_ASSIGN_OR_RETURN(c.container, quantizer::container_for(c.scheme));
  } else {
    FRESHET_ASSIGN_OR_RETURN(c.container, quantizer::container_by_name(o.format));
    const Status fits = c.container->supports(c.scheme);
    if (!fits.ok()) return fits.with_context("--format " + o.format);
  }
  return c;
}

// Containers leave embeddings and the head as they are.
Status check_container_options(const Options& o) {
  for (const auto& [option, value] : {std::pair{"--token-embedding-type", o.recipe.embedding_type},
                                      {"--output-tensor-type", o.recipe.output_type}}) {
    if (value.empty() || value == "f16" || value == "bf16" || value == "F16" || value == "BF16")
      continue;
    return unsupported("{} {}: folders keep embeddings and heads in 16 bits; GGUF files take it",
                       option, value);
  }
  if (!o.recipe.tensor_types.empty() || o.recipe.pure)
    return unsupported("--tensor-type and --pure are for GGUF files");
  return {};
}

// Before the work: an output that cannot be replaced is said at once.
Status check_output(const Options& o, const std::string& source, bool gguf) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!gguf && fs::exists(o.output, error) && !fs::is_directory(o.output, error))
    return invalid_argument("{} is a file: -o takes the folder to write", o.output);
  if (!gguf) {
    quantizer::CheckpointOptions folder;
    folder.output = o.output;
    folder.source = source;
    folder.force = o.force;
    return quantizer::CheckpointWriter::check(folder);
  }
  if (!fs::exists(o.output, error)) return {};
  if (fs::is_directory(o.output, error))
    return invalid_argument("{} is a folder: -o takes the .gguf file to write", o.output);
  if (!o.force) return invalid_argument("{} exists already: --force replaces it", o.output);
  return {};
}

json::Value report_json(const Options& o, const quantizer::QuantizeOptions& q,
                        const quantizer::QuantizeReport& report,
                        const std::vector<std::string>& loaders) {
  json::Object out;
  out["output"] = o.output;
  out["bytes"] = report.bytes;
  out["method"] = q.method.name();
  out["scheme"] = q.recipe != nullptr ? std::string(q.recipe->name()) : q.scheme.name;
  out["format"] = q.container != nullptr ? q.container->name : "gguf";
  out["mean_relative_error"] = report.mean_relative_error;
  out["resumed_parts"] = report.resumed;
  if (!q.calibration.windows.empty()) out["calibration_hash"] = q.calibration.hash;
  json::Array engines;
  for (const std::string& line : loaders) engines.emplace_back(line);
  out["loaders"] = json::Value(std::move(engines));
  json::Array linears;
  for (const quantizer::QuantizedLinear& l : report.linears) {
    json::Object one;
    one["tensor"] = l.tensor;
    if (l.expert >= 0) one["expert"] = l.expert;
    one["format"] = l.format;
    one["tokens"] = l.tokens;
    one["relative_error"] = l.report.relative_error;
    if (l.report.dead_columns > 0) one["dead_columns"] = l.report.dead_columns;
    if (l.outlier_columns > 0) one["outlier_columns"] = l.outlier_columns;
    if (!l.report.note.empty()) one["note"] = l.report.note;
    linears.emplace_back(std::move(one));
  }
  out["linears"] = json::Value(std::move(linears));
  return json::Value(std::move(out));
}

// What needs a look: the worst matrices, and those that something happened to.
void print_report(const Options& o, const quantizer::QuantizeReport& report, Output& out) {
  const quantizer::QuantizedLinear* worst = nullptr;
  std::map<std::string, int64_t> notes;
  for (const quantizer::QuantizedLinear& l : report.linears) {
    if (worst == nullptr || l.report.relative_error > worst->report.relative_error) worst = &l;
    if (!l.report.note.empty()) ++notes[l.report.note];
    if (l.report.dead_columns > 0) ++notes["has columns that no token used"];
  }
  out.print("{}: {}, {} linear layers", o.output, format_bytes(report.bytes),
            report.linears.size());
  if (worst != nullptr) {
    out.print(", error of outputs {:.3f} % on average, {:.3f} % at most ({})",
              100 * report.mean_relative_error, 100 * worst->report.relative_error, worst->tensor);
  }
  out.print("\n");
  int64_t outliers = 0;
  for (const quantizer::QuantizedLinear& l : report.linears) outliers += l.outlier_columns;
  if (outliers > 0) out.print("  {} outlier columns in 16 bits\n", outliers);
  for (const auto& [note, count] : notes) out.print("  {} of them: {}\n", count, note);
}

std::string method_of(const Options& o) {
  if (!o.method.empty()) return o.method;
  if (!o.calibration.empty()) return "gptq";
  return o.recipe.imatrices.empty() ? "rtn" : "imatrix";
}

// Everything that the job's options refer to.
struct Inputs {
  Choice choice;
  quantizer::RecipeOverrides overrides;
  std::optional<quantizer::Imatrix> imatrix;
  std::string path;
  std::unique_ptr<quantizer::WorkingModel> working;
  std::shared_ptr<runtime::Compute> device;  // nullptr: the processor does all of it
};

// --kv-cache-scheme.
Status check_cache_scheme(const Options& o, const Choice& choice) {
  if (o.kv_cache_scheme.empty()) return {};
  if (o.kv_cache_scheme != "fp8")
    return invalid_argument("--kv-cache-scheme {}: there is fp8", o.kv_cache_scheme);
  if (choice.recipe)
    return unsupported("--kv-cache-scheme: GGUF files have no factors of keys and values");
  if (choice.container->kv_scales == quantizer::KvScaleNames::kNone) {
    return unsupported(
        "--kv-cache-scheme: --format {} has no factors of keys and values; compressed-tensors and "
        "modelopt have",
        choice.container->name);
  }
  if (o.calibration.empty())
    return invalid_argument("--kv-cache-scheme needs --calibration FILE, which it measures");
  return {};
}

Status check_calibration(const Options& o, const Inputs& in, const quantizer::MethodSet& method) {
  if (!o.calibration.empty()) return {};
  const bool given = in.imatrix && !method.gptq && !method.scales_channels();
  if (method.needs_text() && !given)
    return invalid_argument(
        "--method {} needs --calibration FILE, a text like what the model reads", method.name());
  if (!in.choice.recipe && quantizer::needs_inputs(in.choice.scheme))
    return invalid_argument("--scheme {} needs --calibration FILE: {}", o.scheme,
                            in.choice.scheme.outlier_threshold > 0.0f
                                ? "that tells which columns are outliers"
                                : "its activations have a fixed scale");
  return {};
}

// Checks and reads what the options name.
Status read_inputs(const Options& o, Inputs& in, quantizer::QuantizeOptions& q) {
  FRESHET_ASSIGN_OR_RETURN(in.choice, choose(o));
  FRESHET_ASSIGN_OR_RETURN(q.method, quantizer::MethodSet::parse(method_of(o)));
  const bool gguf = in.choice.recipe.has_value();
  if (o.max_loss > 0.0 && o.evaluate.empty())
    return invalid_argument("--max-loss needs --evaluate FILE, a text to measure the loss on");
  if (!gguf) FRESHET_RETURN_IF_ERROR(check_container_options(o));
  FRESHET_ASSIGN_OR_RETURN(in.overrides, recipe_overrides(o.recipe));
  FRESHET_ASSIGN_OR_RETURN(in.imatrix, importance_matrix(o.recipe));
  FRESHET_RETURN_IF_ERROR(check_calibration(o, in, q.method));
  FRESHET_RETURN_IF_ERROR(check_cache_scheme(o, in.choice));
  q.kv_scales = !o.kv_cache_scheme.empty();
  q.memory = 0;
  if (o.memory != "0") {
    FRESHET_ASSIGN_OR_RETURN(q.memory, parse_bytes(o.memory));
  }
  FRESHET_ASSIGN_OR_RETURN(in.path, resolve_model(o.model));
  FRESHET_RETURN_IF_ERROR(check_output(o, in.path, gguf));
  runtime::ComputeOptions compute_options;
  compute_options.threads = o.threads;
  compute_options.cpu_isa = o.cpu_isa;
  FRESHET_ASSIGN_OR_RETURN(const auto compute, runtime::Compute::open(compute_options));
  FRESHET_ASSIGN_OR_RETURN(in.working, quantizer::WorkingModel::open(in.path, compute));
  if (o.device != "cpu") {
    runtime::ComputeOptions there;
    there.threads = 1;
    there.device = o.device;
    FRESHET_ASSIGN_OR_RETURN(in.device, runtime::Compute::open(there));
    q.device = in.device->device();
  }
  q.output = o.output;
  while (q.output.size() > 1 && q.output.ends_with('/')) q.output.pop_back();
  q.recipe = gguf ? &*in.choice.recipe : nullptr;
  q.overrides = &in.overrides;
  FRESHET_ASSIGN_OR_RETURN(q.target, size_target(o.recipe));
  q.container = in.choice.container;
  q.scheme = in.choice.scheme;
  if (!gguf) q.scheme = q.container->fit(q.scheme, in.working->dtype());
  q.ignore = o.ignore;
  q.force = o.force;
  q.imatrix = in.imatrix ? &*in.imatrix : nullptr;
  q.producer = "freshet " FRESHET_VERSION;
  q.name = o.name.empty() ? std::filesystem::path(in.path).filename().string() : o.name;
  if (o.calibration.empty()) return {};
  const int64_t vocab = in.working->model().spec.vocab_size;
  FRESHET_ASSIGN_OR_RETURN(auto read,
                           quantizer::read_windows(o.calibration, in.path, vocab, o.windows));
  q.calibration = {std::move(read.windows),
                   std::filesystem::path(o.calibration).filename().string(), read.hash};
  return {};
}

// Measures the loss, and takes the output back if there is too much of it.
Result<eval::ModelComparison> evaluate(const Options& o, const Inputs& in, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const eval::ModelComparison loss,
                           measure_loss(in.path, o.output, o.evaluate, o.threads, context));
  if (o.max_loss > 0.0 && loss.delta.mean > o.max_loss) {
    std::error_code error;
    std::filesystem::remove_all(o.output, error);
    return resource_exhausted(
        "the loss is {:.4f} +- {:.4f} nats per token, above --max-loss {}: {} is deleted",
        loss.delta.mean, loss.delta.standard_error, o.max_loss, o.output);
  }
  FRESHET_RETURN_IF_ERROR(record_loss(o.output, in.choice.recipe.has_value(), loss));
  return loss;
}

Status quantize(const Options& o, Context& context) {
  give_back_large_blocks();
  Inputs in;
  quantizer::QuantizeOptions q;
  FRESHET_RETURN_IF_ERROR(read_inputs(o, in, q));
  std::vector<std::string> warnings;  // printed if the output was written
  q.note = [&](const std::string& line) {
    if (std::find(warnings.begin(), warnings.end(), line) == warnings.end())
      warnings.push_back(line);
  };
  FRESHET_ASSIGN_OR_RETURN(const auto loaders, quantizer::loaders_of(*in.working, q));
  for (const std::string& line : loaders) {
    if (!o.json) context.out.print("{}\n", line);
  }
  const Interrupts::Handler on_interrupt(context.interrupts, [] {});
  ProgressLine progress;
  q.progress = [&](const std::string& stage, double fraction) {
    progress.update(stage, fraction);
    return !context.interrupts.requested();
  };
  if (!o.evaluate.empty()) q.metadata = unmeasured_loss();
  const auto report = quantizer::quantize(*in.working, q);
  progress.clear();
  if (!report.ok()) {
    std::error_code error;
    if (std::filesystem::exists(q.output + ".partial", error))
      log_warning("what is finished is in {}.partial: the same command continues there", q.output);
    return report.status();
  }
  for (const std::string& line : warnings) log_warning("{}", line);
  std::optional<eval::ModelComparison> loss;
  if (!o.evaluate.empty()) {
    in.working.reset();
    FRESHET_ASSIGN_OR_RETURN(loss, evaluate(o, in, context));
  }
  if (o.json) {
    json::Value json = report_json(o, q, *report, loaders);
    if (loss) json.as_object()["loss"] = json::Value(eval::comparison_json(*loss));
    context.out.write(json::write(json) + "\n");
    return {};
  }
  print_report(o, *report, context.out);
  if (loss) context.out.write(eval::comparison_text(*loss));
  return {};
}

}  // namespace quantize_command

void add_quantize(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<quantize_command::Options>();
  CLI::App* c = program.add_subcommand(
      "quantize", "Quantise a Hugging Face folder: GPTQ, AWQ, FP8, NVFP4, GGUF and others");
  c->add_option("model", o->model, "The Hugging Face folder, in 16 or 32 bits")->required();
  c->add_option("-o,--output", o->output, "The folder or .gguf file to write")->required();
  c->add_option("--scheme", o->scheme,
                "What to make: a preset (W4A16, W8A8, FP8_DYNAMIC, NVFP4, NF4 ..., with _G32 or "
                "_ASYM behind it) or a type of GGUF files (Q4_K_M, IQ4_XS ...)")
      ->required();
  c->add_option("--method", o->method,
                "rtn, imatrix, gptq, awq or smoothquant, or some joined by '+' (default: gptq with "
                "a calibration text, else rtn)");
  c->add_option("--format", o->format,
                "gguf, compressed-tensors, gptq, awq, fp8, modelopt or bitsandbytes (default: by "
                "the scheme)");
  c->add_option("--calibration", o->calibration,
                "A text, JSON lines with \"text\" or \"messages\", or a list of lists of ids");
  c->add_option("--samples", o->windows.samples, "Calibration windows")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  c->add_option("--seq-len", o->windows.length, "Tokens of a calibration window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  c->add_flag("--parse-special", o->windows.parse_special,
              "Special tokens that are spelled out in the calibration text are tokens");
  c->add_option("--memory", o->memory,
                "Memory for activations, beyond which they go to disk, and for the "
                "second moments of a layer's experts")
      ->capture_default_str();
  c->add_option("--evaluate", o->evaluate,
                "A text, not that of the calibration, to measure the loss on (may be repeated)")
      ->allow_extra_args(false);
  c->add_option("--max-loss", o->max_loss,
                "Fail, and delete the output, if it loses more nats per token than this")
      ->check(above_zero());
  c->add_option(
       "--ignore", o->ignore,
       "Modules whose name contains this regular expression stay as they are (may be repeated)")
      ->allow_extra_args(false);
  c->add_option("--kv-cache-scheme", o->kv_cache_scheme,
                "fp8: measure factors of keys and values, for --kv-cache-dtype fp8");
  c->add_option("--outlier-threshold", o->outlier_threshold,
                "LLM_INT8_OUTLIERS: columns whose inputs reach this magnitude on the calibration "
                "text stay in 16 bits (default: 6)")
      ->check(above_zero());
  add_recipe_options(*c, o->recipe);
  c->add_option("--name", o->name, "The model's name in a GGUF file (default: the folder's)");
  c->add_option(
       "--device", o->device,
       "cpu, or cuda or cuda:N (GPU N): it sums up second moments, with the same bits; auto "
       "takes a GPU if one is found")
      ->capture_default_str();
  c->add_option("--cpu-isa", o->cpu_isa, "Highest instruction set to use");
  c->add_option("-t,--threads", o->threads, "Worker threads (default: one per physical core)");
  c->add_flag("--force", o->force, "Replace the output if it exists");
  c->add_flag("--json", o->json, "Print the report as JSON");
  add_examples(*c,
               "  freshet quantize model/ -o model-w4 --scheme W4A16 --calibration book.txt\n"
               "  freshet quantize model/ -o model.gguf --scheme Q4_K_M --method imatrix+gptq "
               "--calibration book.txt");
  c->callback([o, &context, &action] { action = [o, &context] { return quantize(*o, context); }; });
}

}  // namespace freshet::cli

#include "quantizer/calibrate.h"

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "quantizer/calibration/windows.h"

namespace freshet::cli {
namespace calibrate_command {

struct Options {
  std::string model;
  std::vector<std::string> texts;
  std::string output;
  std::vector<std::string> merge;
  quantizer::WindowOptions windows;
  std::string memory = "1GiB";
  int threads = 0;
  bool force = false;
};

// What the model says of one text.
Result<quantizer::Imatrix> run_text(const Options& o, const std::string& text,
                                    const std::string& path, quantizer::WorkingModel& working,
                                    Context& context) {
  FRESHET_ASSIGN_OR_RETURN(
      const auto read,
      quantizer::read_windows(text, path, working.model().spec.vocab_size, o.windows));
  quantizer::CalibrateOptions c;
  FRESHET_ASSIGN_OR_RETURN(c.memory, parse_bytes(o.memory));
  const std::filesystem::path folder = std::filesystem::path(o.output).parent_path();
  c.folder = folder.empty() ? "." : folder.string();
  c.dataset = std::filesystem::path(text).filename().string();
  c.chunk_size = static_cast<uint32_t>(o.windows.length);
  ProgressLine progress;
  c.progress = [&](double fraction) {
    progress.update("calibrating", fraction);
    return !context.interrupts.requested();
  };
  auto imatrix = quantizer::calibrate(working, read.windows, c);
  progress.clear();
  return imatrix;
}

Status calibrate(const Options& o, Context& context) {
  std::error_code error;
  if (std::filesystem::exists(o.output, error) && !o.force)
    return invalid_argument("{} exists already: --force replaces it", o.output);
  if (o.texts.empty() && o.merge.empty())
    return invalid_argument("name a text to calibrate on, or files to --merge");
  if (!o.texts.empty() && o.model.empty())
    return invalid_argument("name the model before the text");
  std::optional<quantizer::Imatrix> all;
  const auto add = [&](quantizer::Imatrix one) -> Status {
    if (all) return all->merge(one);
    all.emplace(std::move(one));
    return {};
  };
  for (const std::string& file : o.merge) {
    FRESHET_ASSIGN_OR_RETURN(auto one, quantizer::Imatrix::load(file));
    FRESHET_RETURN_IF_ERROR(add(std::move(one)).with_context(file));
  }
  if (!o.texts.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
    runtime::ComputeOptions compute_options;
    compute_options.threads = o.threads;
    FRESHET_ASSIGN_OR_RETURN(const auto compute, runtime::Compute::open(compute_options));
    FRESHET_ASSIGN_OR_RETURN(const auto working, quantizer::WorkingModel::open(path, compute));
    const Interrupts::Handler on_interrupt(context.interrupts, [] {});
    for (const std::string& text : o.texts) {
      FRESHET_ASSIGN_OR_RETURN(auto one, run_text(o, text, path, *working, context));
      FRESHET_RETURN_IF_ERROR(add(std::move(one)).with_context(text));
    }
  }
  FRESHET_RETURN_IF_ERROR(o.output.ends_with(".dat") ? all->save_dat(o.output)
                                                     : all->save_gguf(o.output));
  context.out.print("{}: {} tensors, {} windows\n", o.output, all->entries.size(),
                    all->chunk_count);
  return {};
}

}  // namespace calibrate_command

void add_calibrate(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<calibrate_command::Options>();
  CLI::App* c = program.add_subcommand(
      "calibrate", "Measure what a model's layers read, as an importance matrix");
  c->add_option("model", o->model, "The Hugging Face folder");
  c->add_option("texts", o->texts,
                "Texts, JSON lines with \"text\" or \"messages\", or lists of lists of ids");
  c->add_option("-o,--output", o->output, "The file to write: .gguf, or .dat for older tools")
      ->required();
  c->add_option("--merge", o->merge, "An importance matrix to add (may be repeated)")
      ->allow_extra_args(false);
  c->add_option("--samples", o->windows.samples, "Windows of each text")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  c->add_option("--seq-len", o->windows.length, "Tokens of a window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  c->add_flag("--parse-special", o->windows.parse_special,
              "Special tokens that are spelled out in the text are tokens");
  c->add_option("--memory", o->memory, "Memory for activations; what is beyond goes to disk")
      ->capture_default_str();
  c->add_option("-t,--threads", o->threads, "Worker threads (default: one per physical core)");
  c->add_flag("--force", o->force, "Replace the output if it exists");
  add_examples(*c,
               "  freshet calibrate model/ book.txt -o imatrix.gguf\n"
               "  freshet calibrate --merge a.gguf --merge b.dat -o both.gguf");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return calibrate(*o, context); }; });
}

}  // namespace freshet::cli

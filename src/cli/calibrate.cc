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
  std::string output, kv_scales;
  std::vector<std::string> merge;
  quantizer::WindowOptions windows;
  std::string memory = "1GiB";
  int threads = 0;
  bool force = false;
};

// What the model says of one text.
Result<quantizer::Calibration> run_text(const Options& o, const std::string& text,
                                        const std::string& path, quantizer::WorkingModel& working,
                                        Context& context) {
  FRESHET_ASSIGN_OR_RETURN(
      const auto read,
      quantizer::read_windows(text, path, working.model().spec.vocab_size, o.windows));
  quantizer::CalibrateOptions c;
  FRESHET_ASSIGN_OR_RETURN(c.memory, parse_bytes(o.memory));
  const std::string& file = o.output.empty() ? o.kv_scales : o.output;
  const std::filesystem::path folder = std::filesystem::path(file).parent_path();
  c.folder = folder.empty() ? "." : folder.string();
  c.dataset = std::filesystem::path(text).filename().string();
  c.chunk_size = static_cast<uint32_t>(o.windows.length);
  c.matrix = !o.output.empty();
  ProgressLine progress;
  c.progress = [&](double fraction) {
    progress.update("calibrating", fraction);
    return !context.interrupts.requested();
  };
  auto found = quantizer::calibrate(working, read.windows, c);
  progress.clear();
  return found;
}

// What texts and merged files say together.
class Sum {
 public:
  Status add(quantizer::Imatrix one) {
    if (imatrix_) return imatrix_->merge(one);
    imatrix_.emplace(std::move(one));
    return {};
  }
  Status add(quantizer::Calibration one) {
    FRESHET_RETURN_IF_ERROR(kv_scales_.merge(one.kv_scales));
    return add(std::move(one.imatrix));
  }
  Status add_file(const std::string& file) {
    if (file.ends_with(".safetensors")) {
      FRESHET_ASSIGN_OR_RETURN(const auto one, quantizer::KvScaleFile::load(file));
      return kv_scales_.merge(one).with_context(file);
    }
    FRESHET_ASSIGN_OR_RETURN(auto one, quantizer::Imatrix::load(file));
    return add(std::move(one)).with_context(file);
  }
  Status save(const Options& o, Context& context) const {
    if (!o.output.empty() && !imatrix_)
      return invalid_argument("--output: neither a text nor an importance matrix to --merge");
    if (!o.kv_scales.empty() && kv_scales_.scales.empty())
      return invalid_argument("--kv-scales: no layer keeps keys and values that have factors");
    if (!o.output.empty()) {
      FRESHET_RETURN_IF_ERROR(o.output.ends_with(".dat") ? imatrix_->save_dat(o.output)
                                                         : imatrix_->save_gguf(o.output));
      context.out.print("{}: {} tensors, {} windows\n", o.output, imatrix_->entries.size(),
                        imatrix_->chunk_count);
    }
    if (o.kv_scales.empty()) return {};
    FRESHET_RETURN_IF_ERROR(kv_scales_.save(o.kv_scales));
    context.out.print("{}: {} factors of keys and values\n", o.kv_scales, kv_scales_.scales.size());
    return {};
  }

 private:
  std::optional<quantizer::Imatrix> imatrix_;
  quantizer::KvScaleFile kv_scales_;
};

Status check(const Options& o) {
  if (o.output.empty() && o.kv_scales.empty())
    return invalid_argument(
        "name the file to write: --output for an importance matrix, --kv-scales for factors of "
        "keys and values");
  std::error_code error;
  for (const std::string& file : {o.output, o.kv_scales}) {
    if (!file.empty() && std::filesystem::exists(file, error) && !o.force)
      return invalid_argument("{} exists already: --force replaces it", file);
  }
  if (!o.kv_scales.empty() && !o.kv_scales.ends_with(".safetensors"))
    return invalid_argument("--kv-scales {}: the name ends in .safetensors", o.kv_scales);
  for (const std::string& file : o.merge) {
    const bool scales = file.ends_with(".safetensors");
    if (scales && o.kv_scales.empty())
      return invalid_argument("--merge {}: scales are written by --kv-scales FILE", file);
    if (!scales && o.output.empty())
      return invalid_argument("--merge {}: an importance matrix is written by -o FILE", file);
  }
  if (o.texts.empty() && o.merge.empty())
    return invalid_argument("name a text to calibrate on, or files to --merge");
  if (!o.texts.empty() && o.model.empty())
    return invalid_argument("name the model before the text");
  return {};
}

Status calibrate(const Options& o, Context& context) {
  FRESHET_RETURN_IF_ERROR(check(o));
  Sum all;
  for (const std::string& file : o.merge) FRESHET_RETURN_IF_ERROR(all.add_file(file));
  if (!o.texts.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
    runtime::ComputeOptions compute_options;
    compute_options.threads = o.threads;
    FRESHET_ASSIGN_OR_RETURN(const auto compute, runtime::Compute::open(compute_options));
    FRESHET_ASSIGN_OR_RETURN(const auto working, quantizer::WorkingModel::open(path, compute));
    const Interrupts::Handler on_interrupt(context.interrupts, [] {});
    for (const std::string& text : o.texts) {
      FRESHET_ASSIGN_OR_RETURN(auto one, run_text(o, text, path, *working, context));
      FRESHET_RETURN_IF_ERROR(all.add(std::move(one)).with_context(text));
    }
  }
  return all.save(o, context);
}

}  // namespace calibrate_command

void add_calibrate(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<calibrate_command::Options>();
  CLI::App* c = program.add_subcommand(
      "calibrate", "Measure what a model's layers read, and its keys and values");
  c->add_option("model", o->model, "The Hugging Face folder");
  c->add_option("texts", o->texts,
                "Texts, JSON lines with \"text\" or \"messages\", or lists of lists of ids");
  c->add_option("-o,--output", o->output,
                "The importance matrix to write: .gguf, or .dat for older tools");
  c->add_option("--kv-scales", o->kv_scales,
                "Write factors of keys and values for a quantised cache (--kv-cache-dtype): as "
                "kv_scales.safetensors in the model's folder, they are read with it");
  c->add_option("--merge", o->merge,
                "An importance matrix, or factors (.safetensors), to add (may be repeated)")
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
               "  freshet calibrate model/ book.txt --kv-scales model/kv_scales.safetensors\n"
               "  freshet calibrate --merge a.gguf --merge b.dat -o both.gguf");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return calibrate(*o, context); }; });
}

}  // namespace freshet::cli

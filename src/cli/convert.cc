#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/recipe_options.h"
#include "loader/checkpoint.h"
#include "quantizer/gguf_export.h"

namespace freshet::cli {
namespace convert_command {

struct Options {
  std::string input;
  std::string output;
  std::string type;  // empty: q8_0, or what a target chooses
  std::string name;
  std::vector<std::string> metadata;
  RecipeArguments recipe;
  int threads = 0;
  bool force = false;
};

// ".../tiny/" -> "tiny".
std::string name_of_folder(const std::string& path) {
  std::error_code error;
  const auto whole = std::filesystem::weakly_canonical(path, error);
  return whole.filename().empty() ? whole.parent_path().filename() : whole.filename();
}

Status convert(const Options& o, Context& context) {
  quantizer::ExportOptions e;
  FRESHET_ASSIGN_OR_RETURN(e.target, size_target(o.recipe));
  if (e.target.given() && (!o.type.empty() || o.recipe.pure))
    return invalid_argument("{} chooses the types itself: leave out {}",
                            o.recipe.target_bpw > 0 ? "--target-bpw" : "--target-size",
                            o.type.empty() ? "--pure" : "--type");
  FRESHET_ASSIGN_OR_RETURN(e.recipe, quantizer::Recipe::by_name(o.type.empty() ? "q8_0" : o.type));
  FRESHET_ASSIGN_OR_RETURN(e.overrides, recipe_overrides(o.recipe));
  for (const std::string& entry : o.metadata) {
    const size_t equals = entry.find('=');
    if (equals == 0 || equals == std::string::npos)
      return invalid_argument("--set {}: write KEY=VALUE", entry);
    e.metadata.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  std::error_code error;
  if (std::filesystem::is_directory(o.output, error))
    return invalid_argument("{} is a folder: -o takes the file to write, e.g. {}", o.output,
                            (std::filesystem::path(o.output) / "model.gguf").string());
  if (std::filesystem::exists(o.output, error) && !o.force)
    return invalid_argument("{} exists already: --force replaces it", o.output);
  FRESHET_ASSIGN_OR_RETURN(const std::string input, resolve_model(o.input));
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(input));
  FRESHET_ASSIGN_OR_RETURN(const auto imatrix, importance_matrix(o.recipe));
  if (imatrix) {
    e.imatrix = &*imatrix;
    e.imatrix_file = o.recipe.imatrices.front();
  }
  e.output = o.output;
  e.name = o.name.empty() ? name_of_folder(input) : o.name;
  const Interrupts::Handler on_interrupt(context.interrupts, [] {});
  ProgressLine progress;
  e.progress = [&](double fraction) {
    progress.update("converting", fraction);
    return !context.interrupts.requested();
  };
  std::vector<std::string> warnings;  // printed only if the file was written
  e.warn = [&](const std::string& line) { warnings.push_back(line); };
  ThreadPool pool(o.threads);
  FRESHET_RETURN_IF_ERROR(quantizer::export_gguf(checkpoint, pool, e));
  progress.clear();
  for (const std::string& line : warnings) log_warning("{}", line);
  const auto bytes = std::filesystem::file_size(o.output, error);
  context.out.print("{}: {}, {}\n", o.output, format_bytes(bytes),
                    e.target.given() ? "chosen by size" : e.recipe.name());
  return {};
}

}  // namespace convert_command

void add_convert(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<convert_command::Options>();
  CLI::App* c = program.add_subcommand("convert", "Convert a Hugging Face folder to a GGUF file");
  c->add_option("input", o->input, "The Hugging Face folder")->required();
  c->add_option("-o,--output", o->output, "The .gguf file to write")->required();
  c->add_option("--type", o->type,
                "Format of the weights, by default q8_0: " + quantizer::Recipe::names());
  add_recipe_options(*c, o->recipe);
  c->add_option("--name", o->name, "The model's name in the file (default: the folder's)");
  c->add_option("--set", o->metadata, "KEY=VALUE, metadata to set or replace (may be repeated)")
      ->allow_extra_args(false);
  c->add_option("-t,--threads", o->threads, "Worker threads (default: one per physical core)");
  c->add_flag("--force", o->force, "Replace the output if it exists");
  add_examples(
      *c,
      "  freshet convert models/tiny -o tiny-q8_0.gguf --type q8_0\n"
      "  freshet convert models/tiny -o tiny.gguf --type q4_k_m --set general.license=mit\n"
      "  freshet convert models/tiny -o tiny.gguf --type iq4_xs --imatrix imatrix.gguf "
      "--tensor-type attn_v=q6_k");
  c->callback([o, &context, &action] { action = [o, &context] { return convert(*o, context); }; });
}

}  // namespace freshet::cli

#include "cli/recipe_options.h"

#include <utility>

#include "cli/options.h"

namespace freshet::cli {

void add_recipe_options(CLI::App& command, RecipeArguments& arguments) {
  RecipeArguments& a = arguments;
  command
      .add_option("--imatrix", a.imatrices,
                  "An importance matrix, .gguf or .dat (may be repeated: they are merged)")
      ->allow_extra_args(false);
  command
      .add_option(
          "--tensor-type", a.tensor_types,
          "PATTERN=TYPE for tensors whose GGUF name contains the regular expression (may be "
          "repeated: the first one found decides)")
      ->allow_extra_args(false);
  command.add_option("--output-tensor-type", a.output_type,
                     "Type of the output head, also if it is the embedding");
  command.add_option("--token-embedding-type", a.embedding_type, "Type of the token embedding");
  command.add_flag("--pure", a.pure, "One type for all tensors: no mixture");
  CLI::Option* include =
      command
          .add_option("--include-weights", a.include_weights,
                      "Use the importance matrix only for tensors whose name contains this (may "
                      "be repeated)")
          ->allow_extra_args(false);
  command
      .add_option("--exclude-weights", a.exclude_weights,
                  "Do not use the importance matrix for these tensors (may be repeated)")
      ->allow_extra_args(false)
      ->excludes(include);
  CLI::Option* bpw =
      command.add_option("--target-bpw", a.target_bpw,
                         "Bits per weight: formats are chosen for each tensor by measured error");
  command
      .add_option("--target-size", a.target_size,
                  "Size of the file, e.g. 700M or 4GiB: formats are chosen in the same way")
      ->excludes(bpw);
}

Result<quantizer::SizeTarget> size_target(const RecipeArguments& a) {
  quantizer::SizeTarget out;
  if (a.target_bpw != 0 && !(a.target_bpw > 0 && a.target_bpw <= 32))
    return invalid_argument("--target-bpw {}: bits per weight between 0 and 32", a.target_bpw);
  out.bits_per_weight = a.target_bpw;
  if (a.target_size.empty()) return out;
  const auto bytes = parse_bytes(a.target_size);
  if (!bytes.ok() || *bytes == 0)
    return invalid_argument("--target-size {}: not a size, e.g. 700M or 4GiB", a.target_size);
  out.file_bytes = static_cast<int64_t>(*bytes);
  return out;
}

Result<quantizer::RecipeOverrides> recipe_overrides(const RecipeArguments& a) {
  quantizer::RecipeOverrides out;
  for (const std::string& text : a.tensor_types) FRESHET_RETURN_IF_ERROR(out.add_tensor_type(text));
  const auto type = [](const char* option, const std::string& name) -> Result<quant::Format> {
    auto f = quantizer::writable_type(name);
    if (!f.ok()) return invalid_argument("{}: {}", option, f.status().message());
    return f;
  };
  if (!a.output_type.empty()) {
    FRESHET_ASSIGN_OR_RETURN(out.output, type("--output-tensor-type", a.output_type));
  }
  if (!a.embedding_type.empty()) {
    FRESHET_ASSIGN_OR_RETURN(out.embedding, type("--token-embedding-type", a.embedding_type));
  }
  out.pure = a.pure;
  out.include_weights = a.include_weights;
  out.exclude_weights = a.exclude_weights;
  if (a.imatrices.empty() && !(a.include_weights.empty() && a.exclude_weights.empty()))
    return invalid_argument("{}: needs --imatrix",
                            a.include_weights.empty() ? "--exclude-weights" : "--include-weights");
  return out;
}

Result<std::optional<quantizer::Imatrix>> importance_matrix(const RecipeArguments& a) {
  std::optional<quantizer::Imatrix> out;
  for (const std::string& path : a.imatrices) {
    FRESHET_ASSIGN_OR_RETURN(quantizer::Imatrix m, quantizer::Imatrix::load(path));
    if (!out) {
      out = std::move(m);
    } else if (const Status merged = out->merge(m); !merged.ok()) {
      return invalid_argument("--imatrix {}: {}", path, merged.message());
    }
  }
  return out;
}

}  // namespace freshet::cli

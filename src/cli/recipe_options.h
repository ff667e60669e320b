// The options that choose formats of tensors and an importance matrix, with llama-quantize's names.
//
// add_recipe_options() declares them; after parsing, recipe_overrides() and importance_matrix()
// check and read what was given. Single-threaded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "quantizer/imatrix.h"
#include "quantizer/recipe.h"
#include "quantizer/size_target.h"

namespace freshet::cli {

struct RecipeArguments {
  std::vector<std::string> tensor_types;
  std::string output_type;
  std::string embedding_type;
  bool pure = false;
  std::vector<std::string> include_weights;
  std::vector<std::string> exclude_weights;
  std::vector<std::string> imatrices;
  double target_bpw = 0;
  std::string target_size;
};
void add_recipe_options(CLI::App& command, RecipeArguments& arguments);

Result<quantizer::RecipeOverrides> recipe_overrides(const RecipeArguments& arguments);
Result<quantizer::SizeTarget> size_target(const RecipeArguments& arguments);
// All files merged; nullopt if none was given.
Result<std::optional<quantizer::Imatrix>> importance_matrix(const RecipeArguments& arguments);

}  // namespace freshet::cli

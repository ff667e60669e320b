// The storage format of each tensor of a GGUF file: the recipes of llama-quantize.
//
// A recipe is a row of a table (recipe.cc): a base format, and rules that give some tensors more or
// fewer bits, by the tensor's name, its place among its kind, and facts about the model. Formats
// are named, not enumerated, so a recipe whose formats cannot all be written by this build is
// refused with the name of the missing one. Types that the user gives for single tensors
// (RecipeOverrides) go before the rules. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "quant/format.h"
#include "tokenizer/regex.h"

namespace freshet::quantizer {

struct RecipeRow;

// What the rules ask about the model.
struct RecipeModel {
  int layers = 0;
  int heads_per_kv_head = 1;
  int experts = 0;          // 0: no experts
  bool tied = false;        // the embedding is also the output head
  bool importance = false;  // an importance matrix will be used
};

// What the rules ask about a tensor.
struct RecipeTensor {
  std::string name;            // in the GGUF file
  std::vector<int64_t> shape;  // outermost first
};

// Formats that the user asks for, and the tensors that the importance matrix is used for.
struct RecipeOverrides {
  struct TensorType {
    std::string pattern;  // as given, for errors
    std::shared_ptr<const tokenizer::Regex> regex;
    quant::Format format;
  };
  std::vector<TensorType> tensor_types;  // the first one whose pattern is found in a name applies
  std::optional<quant::Format> output;
  std::optional<quant::Format> embedding;
  bool pure = false;  // the base format for every tensor that is quantised at all
  // Parts of names: only these tensors use the importance matrix, or all but these.
  std::vector<std::string> include_weights, exclude_weights;

  // PATTERN=TYPE.
  Status add_tensor_type(std::string_view text);
  // Whether the user gave the tensor's type. `tied`: as in RecipeModel.
  bool fixes(const std::string& name, bool tied) const;
  bool uses_importance(std::string_view name) const;
};

// The types of a GGUF file that this build can write.
std::vector<quant::Format> writable_types();
// One of them; the error lists them.
Result<quant::Format> writable_type(std::string_view name);

class Recipe {
 public:
  Recipe();  // F16
  // Ignores case. Aliases have the name of their recipe: "q4_k" is "q4_k_m".
  static Result<Recipe> by_name(std::string_view name);
  // The recipes that this build can write, in the order of the table.
  static std::vector<Recipe> all();
  static std::string names();  // of all(), for --help

  // The format of each tensor. `tensors`: all of the file, in any order. `warn` gets a line if rows
  // do not fill the blocks of their formats and others are used; may be empty.
  Result<std::vector<quant::Format>> formats(
      const RecipeModel& model, std::span<const RecipeTensor> tensors,
      const RecipeOverrides& overrides = {},
      const std::function<void(const std::string&)>& warn = {}) const;

  // Whether a tensor in this format needs an importance matrix, because the format loses too much
  // without one.
  bool needs_importance(std::string_view tensor, quant::Format format) const;

  std::string_view name() const;
  // The general.file_type value of a GGUF file.
  uint32_t file_type() const;

 private:
  explicit Recipe(const RecipeRow* row) : row_(row) {}
  const RecipeRow* row_;
};

// Whether llama-quantize quantises the tensor: a matrix that is not a norm, a router, a position
// table or another small part.
bool is_quantised(const RecipeTensor& tensor);

}  // namespace freshet::quantizer

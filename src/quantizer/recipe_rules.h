// The table of recipes: what llama-quantize writes for each of its file types.
//
// Plain constant data. A tensor's format is that of the first rule of its kind whose condition
// holds, else the base format; a few conditions that hold for every recipe are in recipe.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "quantizer/recipe.h"

namespace freshet::quantizer {

enum class TensorKind {
  kOutput,
  kEmbedding,
  kValue,  // also fused queries, keys and values
  kKey,
  kQuery,
  kAttentionOutput,
  kUp,
  kGate,
  kDown,
  kOther,
};

// A tensor's place among those of its kind.
struct TensorPlace {
  int index = 0;  // in the order of layers and names
  int count = 0;
  int layer = 0;
  bool stacked = false;  // experts in one tensor
  const RecipeModel* model = nullptr;

  bool experts(int n) const { return model->experts == n; }
  // The layer where the rules of feed-forward tensors look. Without experts the index is used,
  // which differs if some layers have no such tensor.
  int ff_layer() const { return model->experts > 1 ? layer : index; }
};

struct RecipeRule {
  TensorKind kind = TensorKind::kOther;
  bool (*when)(const TensorPlace&) = nullptr;
  std::string_view format;  // empty: end of the rules
};

// The rules that hold for several recipes.
enum class RecipeFamily {
  kPlain,  // no rules at all
  kUsual,
  kLow,  // one or two bits: has rules of its own for eight experts
  kExperts,
};

struct RecipeRow {
  std::string_view name;
  std::string_view alias;  // or empty
  uint32_t file_type;
  RecipeFamily family;
  std::string_view base;
  std::string_view output;     // of the output head
  std::string_view embedding;  // empty: base
  RecipeRule rules[8];
};

std::span<const RecipeRow> recipe_rows();

}  // namespace freshet::quantizer

// The storage format of each weight when a model is converted.
//
// Recipes are named like GGUF files: "q4_0" or "q6_k" means this format for the matrices; the
// output head gets Q6_K if the rest gets fewer bits; vectors and routers stay F32. "q4_k_m" and
// "q5_k_m" give Q6_K to the value and down projections of half the layers. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "models/weight_names.h"
#include "quant/format.h"

namespace freshet::quantizer {

class Recipe {
 public:
  static Result<Recipe> by_name(std::string_view name);
  static std::string names();  // for --help

  // The format for a matrix with rows of `cols` numbers; if they do not fill whole blocks, the
  // nearest format that fits. `head`: the matrix makes the logits (also the embedding, if tied).
  quant::Format format_for(models::Role role, int layer, int layers, int64_t cols, bool head) const;

  std::string_view name() const { return name_; }
  // The general.file_type value of a GGUF file.
  uint32_t file_type() const { return file_type_; }

 private:
  std::string_view name_;
  quant::Format format_ = quant::Format::kF16;
  uint32_t file_type_ = 1;
  bool mixed_ = false;
};

}  // namespace freshet::quantizer

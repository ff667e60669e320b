// The tensors in the GGUF file of a checkpoint, and the source of each of their rows.
//
// A plan holds views into the checkpoint, which must outlive it. Used by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "layers/spec.h"
#include "models/weight_reader.h"
#include "quantizer/recipe.h"

namespace freshet::quantizer {

// A tensor to write: the rows of its parts, concatenated.
struct Planned {
  struct Part {
    const loader::TensorSource* source = nullptr;
    int64_t first_row = 0;
    int64_t rows = 0;
    // Row indices in the source, counted from first_row; empty: unchanged order.
    std::vector<int64_t> order;
    float factor = 1.0f;  // of the numbers

    int64_t source_row(int64_t row) const {
      return first_row + (order.empty() ? row : order[static_cast<size_t>(row)]);
    }
  };
  std::string name;
  std::vector<int64_t> shape;  // outermost first
  quant::Format format = quant::Format::kF32;
  std::vector<Part> parts;
  bool transposed = false;    // the source is transposed: [cols, rows]
  float offset = 0.0f;        // added to each number
  std::vector<float> values;  // used instead of parts
  // The source's column of each column that is written; empty: unchanged order.
  std::vector<int64_t> columns;

  // Whether numbers and columns are the source's own.
  bool has_own_rows() const;
  int64_t cols() const { return shape.back(); }
  int64_t rows() const;
  // The expert that a row belongs to; 0 if the tensor holds no experts.
  int64_t expert_of(int64_t row) const { return shape.size() > 2 ? row / shape[1] : 0; }
};

class ExportPlanner {
 public:
  using Warn = std::function<void(const std::string& line)>;

  // `overrides`: may be nullptr. `importance`: whether an importance matrix will be used.
  ExportPlanner(const models::WeightReader& reader, const loader::Checkpoint& checkpoint,
                const ModelSpec& spec, const Recipe& recipe,
                const RecipeOverrides* overrides = nullptr, bool importance = false);

  // `warn`: as in Recipe::formats().
  Result<std::vector<Planned>> plan(const Warn& warn = {});
  RecipeModel recipe_model() const;

 private:
  Status global();
  Status layer(int layer);
  Status linear(models::Role role, int layer);
  Status norm(models::Role role, int layer);
  // One for each kind of branch.
  Status branch(const AttentionSpec& a, int layer);
  Status branch(const MlaSpec& a, int layer);
  Status branch(const CrossAttentionSpec& a, int layer);
  Status branch(const MlpSpec& mlp, int layer);
  Status branch(const MoeSpec& moe, int layer);
  Status branch(const ShortConvSpec& conv, int layer);
  Status branch(const MambaSpec& mamba, int layer);
  Status branch(const Mamba2Spec& mamba, int layer);
  Status branch(const DeltaNetSpec& net, int layer);
  Status branch(const LightningSpec& attention, int layer);
  Status branch(const LinearSpec& linear, int layer);
  Status values(models::Role role, int layer, const char* suffix,
                const loader::TensorSource& source, std::vector<int64_t> shape);
  Status convolution(int layer, std::vector<int64_t> order = {});
  Status decay(int layer, std::vector<int64_t> shape);
  Status delta_in(const DeltaNetSpec& net, int layer);
  Status no_biases(std::initializer_list<models::Role> roles, int layer) const;
  Status fold_multipliers();
  Status stacked(const MoeSpec& moe, models::Role own, models::Role together, int layer);
  Status split_gate_up(const loader::TensorSource& source, int layer);
  Status split_rows(models::Role both, models::Role first, models::Role second, int layer);
  void divisors();
  Status all_used() const;

  std::string gguf_name(models::Role role, int layer, const char* suffix) const;
  Status choose_formats(const Warn& warn);
  void add(models::Role role, int layer, const char* suffix, const loader::TensorSource& source,
           std::vector<int64_t> order = {});

  const models::WeightReader& reader_;
  const loader::Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  const Recipe& recipe_;
  const RecipeOverrides* overrides_;
  bool importance_;
  models::WeightNames names_;
  std::vector<Planned> out_;
  std::set<std::string> used_;
};

}  // namespace freshet::quantizer

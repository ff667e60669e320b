// Writes a Hugging Face checkpoint as a GGUF file and quantises it.
//
// Tensors are found by their roles and written under GGUF's names in the layout that GGUF readers
// expect: rows of Q and K in interleaved RoPE order, norms as plain multipliers, experts stacked,
// fused projections in the order Q, K, V. A tensor that would be lost is an error. At most one
// tensor is held in memory; rows are encoded in parallel.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "loader/checkpoint.h"
#include "quantizer/export_plan.h"
#include "quantizer/imatrix.h"
#include "quantizer/recipe.h"
#include "quantizer/size_target.h"

namespace freshet::quantizer {

// A method that encodes tensors better than row by row, for instance with error feedback. Called by
// one thread, in the order of the plan.
class RowSource {
 public:
  // The checkpoint's numbers of the tensor as F32 [rows, cols], in the order in which they are
  // written. Reads them when called; valid until the next tensor.
  using Numbers = std::function<Result<std::span<const float>>()>;

  virtual ~RowSource() = default;
  // Writes all rows of the tensor in p.format to `rows` and returns true; or returns false, and the
  // checkpoint's numbers are encoded as without a RowSource.
  virtual Result<bool> encode(const Planned& p, const Numbers& numbers,
                              std::span<uint8_t> rows) = 0;
};

// The tensors that a file will hold, in its order, with their formats. Their parts point into the
// checkpoint.
struct GgufPlan {
  std::vector<Planned> tensors;
  Recipe recipe;  // whose number is general.file_type
};

struct ExportOptions {
  std::string output;
  Recipe recipe;
  RecipeOverrides overrides;
  SizeTarget target;                 // if given, it chooses the formats and the recipe
  const Imatrix* imatrix = nullptr;  // optional; must outlive the call
  std::string imatrix_file;          // its name in the metadata
  std::string name;                  // general.name
  // Metadata to set or replace: key, and a value written as JSON.
  std::vector<std::pair<std::string, std::string>> metadata;
  const GgufPlan* plan = nullptr;        // made by plan_gguf(); optional
  RowSource* rows = nullptr;             // optional; must outlive the call
  const TensorLosses* losses = nullptr;  // for `target`; optional
  bool feedback = false;                 // `rows` are rounded with error feedback
  bool importance = false;  // `rows` weighs errors by the inputs, as an importance matrix does
  std::function<bool(double fraction)> progress;  // returns false to stop
  // Gets one line for each feature that other readers of GGUF will miss. Must be set.
  std::function<void(const std::string& line)> warn;
};

// What export_gguf() will write with these options.
Result<GgufPlan> plan_gguf(const loader::Checkpoint& checkpoint, ThreadPool& pool,
                           const ExportOptions& options);

Status export_gguf(const loader::Checkpoint& checkpoint, ThreadPool& pool,
                   const ExportOptions& options);

}  // namespace freshet::quantizer

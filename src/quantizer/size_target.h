// Formats for a size: the error of each tensor in each format is measured, and the formats with the
// smallest sum of errors within the budget are chosen.
//
// The error of a tensor is sum w (x - decoded)^2 / sum w x^2 over rows at even distances, w the
// mean square of the input (1 without an importance matrix): the relative error of its outputs.
// With TensorLosses it is multiplied by what such an error costs in this tensor, in nats. The sum
// is not larger than that of any recipe that fits the budget. The same on every machine and for any
// number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "quantizer/export_plan.h"
#include "quantizer/imatrix.h"
#include "quantizer/tensor_loss.h"

namespace freshet::quantizer {

// At most one is set.
struct SizeTarget {
  double bits_per_weight = 0;  // of all tensors of the file, scales included
  int64_t file_bytes = 0;

  bool given() const { return bits_per_weight > 0 || file_bytes > 0; }
};

struct SizeSearch {
  RecipeModel model;
  const RecipeOverrides* overrides = nullptr;
  const Importance* importance = nullptr;  // nullptr: none
  const TensorLosses* losses = nullptr;    // nullptr: all tensors weigh the same
  bool feedback = false;                   // types with a grid will be rounded with error feedback
  int64_t budget = 0;                      // of the tensors' bytes, padding included
  std::function<bool()> go_on;             // false stops the search; may be empty
};

// Bytes of a tensor in a GGUF file, with its padding.
int64_t padded_bytes(const Planned& p, quant::Format format);
// The budget of the tensors; `other_bytes`: what the file holds besides.
int64_t tensor_budget(const SizeTarget& target, const std::vector<Planned>& plan,
                      int64_t other_bytes);

// Sets the formats of the plan's tensors, except those that the overrides fix. Returns the largest
// recipe within the budget (or the smallest one), whose name the file gets.
Result<Recipe> choose_by_size(std::vector<Planned>& plan, const SizeSearch& search,
                              ThreadPool& pool);

}  // namespace freshet::quantizer

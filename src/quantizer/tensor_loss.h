// What noise in each tensor costs: nats of KL divergence of the model's next-token distributions.
//
// Each tensor alone is rounded to a coarse type, and the rest of the model runs on a piece of text:
// the divergence from the unchanged model, over the relative error of the tensor, is its slope. To
// second order the divergence grows with the square of the noise, so the slope times the relative
// error in another format is about the loss in that format, and losses of tensors add up. Results
// do not depend on the number of threads. One thread; the working model is as before at the end.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "quantizer/calibration/part_runner.h"
#include "quantizer/export_plan.h"
#include "quantizer/imatrix.h"
#include "quantizer/working_model.h"

namespace freshet::quantizer {

struct TensorLosses {
  std::map<std::string, double, std::less<>> slopes;  // by GGUF name
  // Of a tensor that could not be measured: the mean of the others.
  double typical = 0.0;
  double of(std::string_view name) const {
    const auto found = slopes.find(name);
    return found == slopes.end() ? typical : found->second;
  }
};

struct TensorLossOptions {
  int64_t tokens = 1024;                          // of the text's first windows
  const Importance* importance = nullptr;         // weighs errors as the search of formats does
  const RecipeOverrides* overrides = nullptr;     // REQUIRED
  size_t memory = size_t{1} << 30;                // of activations; beyond that they are on disk
  std::string folder;                             // for those
  std::function<bool(double fraction)> progress;  // returns false to stop; may be empty
};

// `plan`: the tensors of a GGUF file. Those that quantisation leaves alone are not measured.
Result<TensorLosses> measure_losses(WorkingModel& working, const std::vector<Planned>& plan,
                                    const Windows& windows, const TensorLossOptions& options);

}  // namespace freshet::quantizer

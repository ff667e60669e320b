// Scales that are folded into the operation before some linear layers: AWQ and SmoothQuant.
//
// An input x_j becomes x_j / s_j and a column of the weights w_j s_j, which leaves the output as it
// is and makes the quantised matrix more exact where it matters. The linears of one search read the
// same inputs. Scales are positive and finite; inputs that calibration never saw keep 1. Results do
// not depend on the number of threads.
#pragma once

#include <span>
#include <vector>

#include "quantizer/methods/methods.h"

namespace freshet::quantizer {

struct LinearWeights {
  const float* w = nullptr;  // [rows, cols]
  int64_t rows = 0;
};

struct InputScales {
  std::vector<float> scales;  // [cols]
  float alpha = 0.0f;
  double error_before = 0.0;  // of the search's loss: without scales, and with those chosen
  double error = 0.0;
};

// AWQ: s = mean|x|^a / (mean of |w| over its group's largest)^(1-a), for a in 21 steps of [0, 1],
// and s = 1. The loss is the sum of tr(dW H dW^T) over the linears, on at most 256 rows of each;
// needs stats.mean_abs and stats.gram.
Result<InputScales> awq_search(std::span<const LinearWeights> linears, const Target& target,
                               const InputStats& stats, ThreadPool& pool);

// SmoothQuant: s = max|x|^alpha / max|w|^(1-alpha). With alpha <= 0 it is searched in steps of .05
// by the error of the product with INT8 per token and INT8 per row on `samples`, [tokens, cols]
// inputs; without samples it is .8.
Result<InputScales> smooth_scales(std::span<const LinearWeights> linears, const InputStats& stats,
                                  float alpha, std::span<const float> samples, ThreadPool& pool);

// The statistics of x / s.
InputStats scaled_stats(InputStats stats, std::span<const float> scales);

}  // namespace freshet::quantizer

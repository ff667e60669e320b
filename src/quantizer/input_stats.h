// What calibration knows of the inputs of a linear layer. Plain data; not synchronised.
#pragma once

#include <cstdint>
#include <vector>

namespace freshet::quantizer {

struct InputStats {
  int64_t tokens = 0;
  int64_t cols = 0;
  std::vector<float> mean_abs, max_abs, mean_square;  // [cols]
  std::vector<float> gram;     // [cols, cols]: the mean of x x^T, symmetric; empty: not collected
  std::vector<float> samples;  // [some, cols]: inputs as they were; empty: not collected
};

}  // namespace freshet::quantizer

// Statistics of the inputs of a linear layer, as calibration collects them. Plain data.
#pragma once

#include <cstdint>
#include <vector>

namespace freshet::quantizer {

struct InputStats {
  int64_t tokens = 0;
  int64_t cols = 0;
  std::vector<float> mean_abs, max_abs, mean_square;  // [cols]
  // [cols, cols]: sum of x x^T over the tokens, divided by their number; both triangles. Empty: not
  // collected.
  std::vector<float> gram;
  std::vector<float> samples;  // [some, cols]: inputs as they were; empty: not collected
};

}  // namespace freshet::quantizer

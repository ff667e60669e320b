// Weights of cross-attention, collected token by token: with them a text is aligned with what the
// encoder has read. For one thread at a time.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace freshet {

struct CrossWeights {
  std::vector<std::pair<int, int>> heads;  // the layer and the head in it, of the decoder
  // Filled in: the positions of the encoder's output, and for each of `heads` [tokens, positions],
  // where row t has the weights of the decoder's token at position t; each row has the sum 1.
  int64_t positions = 0;
  std::vector<std::vector<float>> weights;
};

}  // namespace freshet

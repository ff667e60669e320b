// How many bits a checkpoint stores for each weight.
//
// Linear layers of the blocks are counted on their own, since formats differ there: everything that
// a file stores for them (codes, scales, zero points, code books) over the number of weights that
// the architecture has. Biases and norms are not part of them. Pure; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "layers/spec.h"
#include "loader/checkpoint.h"

namespace freshet::eval {

struct ModelSize {
  size_t linear_bytes = 0;     // of the blocks' linear layers
  int64_t linear_weights = 0;  // ditto
  size_t bytes = 0;            // of all tensors
  int64_t weights = 0;         // of all tensors

  double bits_per_weight() const;        // of the blocks' linear layers
  double bits_per_weight_total() const;  // of everything
};

// Weights of the linear layers of all blocks: projections, experts, routers.
int64_t linear_weights(const ModelSpec& spec);

// The order of columns in GPTQ files (g_idx) counts only where it holds information, that is, where
// it does not just list the groups in order.
ModelSize model_size(const loader::Checkpoint& checkpoint, const ModelSpec& spec);
Result<ModelSize> model_size(const std::string& model);

}  // namespace freshet::eval

// A model in parts that are loaded one at a time: for passes over models larger than memory.
//
// The parts of a decoder are its embedding and then its branches, one by one; branches that run in
// parallel stay together. Side streams are not known. Each is a Model of its own. The first reads
// token ids, the others read ForwardBatch::features, the residual stream [tokens, hidden] of the
// part before; all give the stream behind them as StepResults::boundaries, of which there is one.
// Logits are not wanted. Running all parts in order gives the bits of running the whole model. What
// makes logits of the last stream is a Model of its own, without layers. Errors name the tensor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layers/model.h"
#include "loader/checkpoint.h"
#include "models/weight_names.h"
#include "models/weight_reader.h"

namespace freshet::models {

struct Part {
  int layer = -1;  // -1: the embedding
  int first_branch = 0;
  int branches = 0;
};

std::vector<Part> parts_of(const ModelSpec& spec);

// Loads a part. `spec` is that of the whole model. `ops` must outlive the result.
Result<std::unique_ptr<Model>> load_part(const loader::Checkpoint& checkpoint,
                                         const Architecture& architecture, const ModelSpec& spec,
                                         const Part& part, ops::Ops& ops);

// The final norm and the head: reads the stream behind the last part and gives logits.
Result<std::unique_ptr<Model>> load_head(const loader::Checkpoint& checkpoint,
                                         const Architecture& architecture, const ModelSpec& spec,
                                         ops::Ops& ops);

// Where the inputs of linear layers come from: those with the same one read the same numbers.
enum class InputOf {
  kNorm,       // the branch's norm
  kAttention,  // the heads' outputs
  kLatent,     // a normalised latent of MLA, which no projection reads as it is stored
  kQueryLatent,
  kGated,        // the activations of an MLP
  kSharedGated,  // those of the shared expert
  kConvolution,  // of a layer with states: the result of its convolution, ...
  kState,        // ... and of the layer, before the projection out of it
};

// A matrix of a linear layer, as a checkpoint stores it.
struct LinearTensor {
  const loader::TensorSource* source = nullptr;
  Role role = Role::kQuery;
  InputOf input = InputOf::kNorm;
  int layer = -1;
  int expert = -1;  // -1: not an expert's
  int64_t rows = 0, cols = 0;
  Layout layout = Layout::kRows;
  int64_t index = 0, count = 1;  // which matrix of how many in the tensor
};

// The linear layers of a part, in a fixed order. Routers are not among them. The tensors are those
// that the checkpoint has: fused or not.
Result<std::vector<LinearTensor>> linear_tensors(const WeightReader& reader, const ModelSpec& spec,
                                                 const Part& part);

}  // namespace freshet::models

// A model in parts that are loaded one at a time: for passes over models larger than memory.
//
// The parts of a decoder are its embedding and then its branches, one by one; branches that run in
// parallel stay together, and so do those of a layer with a side stream. Each is a Model of its
// own. The first reads token ids, the others read ForwardBatch::features, the residual stream
// [tokens, hidden] of the part before, and with a side stream the token ids, too; all give the
// stream behind them as StepResults::boundaries, of which there is one.
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
  // Not a part that runs, but the matrices that its layer shares with others (BranchSpec::sharers).
  bool shared = false;
};

// The parts that run, in order.
std::vector<Part> parts_of(const ModelSpec& spec);

// One for each set of matrices that several layers share, with the first of these layers.
std::vector<Part> shared_parts_of(const ModelSpec& spec);
// The layers that share them.
const std::vector<int>& sharers_of(const ModelSpec& spec, const Part& shared);

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
  kSide,         // a side stream
  kAdapter,      // what the first matrix of an adapter makes
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
  int branch = -1;               // of the layer, whose first branch is 0
  int adapter = -1;              // of a shared block: which; -1: not an adapter's

  // As WeightReader::find() counts them.
  int which() const { return adapter >= 0 ? adapter : expert; }
};

// A tensor of a branch, which may have the name of any layer that shares it; nullptr: absent.
// `layer` becomes the one that it is named after.
const loader::TensorSource* find_shared(const WeightReader& reader, const BranchSpec& branch,
                                        Role role, std::string_view suffix, int& layer,
                                        int which = -1);

// The linear layers of a part, in a fixed order. Not among them are routers, and what is small and
// decides how much a state keeps: the factors of a delta net's steps, Mamba's step sizes. The
// tensors are those that the checkpoint has: fused or not. A part that runs has no shared matrices,
// but its own adapters of these.
Result<std::vector<LinearTensor>> linear_tensors(const WeightReader& reader, const ModelSpec& spec,
                                                 const Part& part);

// The other matrices that read the norm of a branch: whoever changes the norm changes their
// columns. Of shared matrices: the adapters of all layers that share them.
std::vector<const loader::TensorSource*> other_norm_readers(const WeightReader& reader,
                                                            const ModelSpec& spec, const Part& part,
                                                            int branch);

}  // namespace freshet::models

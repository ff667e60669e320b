// Early exit: behind which layer the target's own final norm and head draft best.
//
// Measured when the model is loaded. The model writes a few short texts, drawn at temperature 1
// from arbitrary first tokens, and each candidate reads the same tokens beside it: how often its
// best token is the model's, and how long its steps take, tell how many tokens per second drafting
// with it would give. The result changes speed only. Blocks the calling thread.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "layers/weights.h"
#include "runtime/loaded_model.h"

namespace freshet::speculative {

// A model of the target's first layers, which shares its weights. REQUIRES: layers is at least 1
// and below the target's; `weights` are the target's.
std::unique_ptr<runtime::LoadedModel> first_layers(std::shared_ptr<runtime::Compute> compute,
                                                   const ModelSpec& target,
                                                   std::shared_ptr<const ModelWeights> weights,
                                                   int layers);

// Ascending, at most half of the layers. REQUIRES: layers >= 2.
std::vector<int> exit_candidates(int layers);

struct ExitLayer {
  int layers = 0;          // that draft
  double agreement = 0.0;  // share of its best tokens that are the model's
  double cost = 0.0;       // of its step, relative to the model's
  double gain = 0.0;       // expected speed, relative to plain decoding
};
// Tokens per second relative to plain decoding, with the best number of drafts in a step, if each
// is accepted with this probability and verification costs no more than a plain step.
double exit_gain(double agreement, double cost);

Result<ExitLayer> measure_exit_layer(std::shared_ptr<runtime::Compute> compute,
                                     const ModelSpec& target,
                                     std::shared_ptr<const ModelWeights> weights,
                                     ops::KvType kv_type);

}  // namespace freshet::speculative

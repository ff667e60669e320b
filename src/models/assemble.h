// Reads all weights of a model. Errors name the tensor.
#pragma once

#include "layers/spec.h"
#include "layers/weights.h"
#include "models/weight_reader.h"

namespace freshet::models {

Result<ModelWeights> assemble(WeightReader& reader, const ModelSpec& spec);
// What makes the residual stream from token ids.
Status assemble_embedding(WeightReader& reader, const ModelSpec& spec, ModelWeights& out);
// That, the final norm and the head.
Status assemble_ends(WeightReader& reader, const ModelSpec& spec, ModelWeights& out);
// One layer; `layer` is its number in the names of the file.
Status assemble_layer(WeightReader& reader, const LayerSpec& spec, int64_t hidden, int layer,
                      LayerWeights& out);

}  // namespace freshet::models

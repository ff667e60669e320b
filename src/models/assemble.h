// Reads all weights of a model. Errors name the tensor.
#pragma once

#include "layers/spec.h"
#include "layers/weights.h"
#include "models/weight_reader.h"

namespace freshet::models {

Result<ModelWeights> assemble(WeightReader& reader, const ModelSpec& spec);

}  // namespace freshet::models

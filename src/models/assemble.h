// Puts a model's weights together, part by part, from a reader. Errors name the tensor.
#pragma once

#include "layers/spec.h"
#include "layers/weights.h"
#include "models/weight_reader.h"

namespace freshet::models {

Status assemble_attention(WeightReader& reader, const ModelSpec& spec, int layer,
                          AttentionWeights& out);
Status assemble_latent_attention(WeightReader& reader, const ModelSpec& spec, int layer,
                                 AttentionWeights& out);
Status assemble_mlp(WeightReader& reader, const ModelSpec& spec, int layer, MlpWeights& out);
Status assemble_experts(WeightReader& reader, const ModelSpec& spec, int layer, MoeWeights& out);
Result<ModelWeights> assemble(WeightReader& reader, const ModelSpec& spec);

}  // namespace freshet::models

// A model of a given shape with random weights, for measuring shapes without their files.
//
// Every matrix is packed in `format` as a loaded one would be, from a small pool of random rows;
// norms are ones, biases zeros. Where a model has experts, tokens choose them as if drawn evenly
// and each by itself. Latent attention is not covered.
#pragma once

#include <memory>

#include "layers/model.h"

namespace freshet::models {

Result<std::unique_ptr<Model>> dummy_model(const ModelSpec& spec, quant::Format format,
                                           ops::Ops& ops);

}  // namespace freshet::models

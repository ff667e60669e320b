// A model of a given shape with random weights, for measuring shapes without their files.
//
// Every matrix is packed as a loaded one would be, from a small pool of random rows; norms are
// ones, biases zeros. In models with experts, each token chooses them evenly and independently of
// the others. Latent attention is not covered.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "layers/model.h"
#include "models/weight_names.h"

namespace freshet::models {

// The format of a matrix of a layer, with rows of `cols` numbers; head: it computes the logits. Not
// called for routers, which stay F32.
using DummyFormat = FunctionRef<quant::Format(Role role, int layer, int64_t cols, bool head)>;

Result<std::unique_ptr<Model>> dummy_model(const ModelSpec& spec, DummyFormat format,
                                           ops::Ops& ops);
// What its weights take, before they are made.
Result<size_t> dummy_bytes(const ModelSpec& spec, DummyFormat format, ops::Ops& ops);

}  // namespace freshet::models

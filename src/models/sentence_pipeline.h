// The pipeline of a sentence-transformers folder: pooling, and the layers behind it.
//
// modules.json lists the modules; each has a folder with its configuration and weights
// (safetensors). Transformer, Pooling, Dense, LayerNorm, Normalize, Dropout and LogitScore are
// read; others are errors. Errors name the file.
#pragma once

#include <string>

#include "base/json.h"
#include "layers/pooled_head.h"
#include "loader/tensor_source.h"

namespace freshet::models {

// A linear layer of `in` features. `bias` may be nullptr.
Result<HeadStage> linear_stage(const loader::TensorSource& weight, const loader::TensorSource* bias,
                               int in);
Result<HeadStage> norm_stage(const loader::TensorSource& weight, const loader::TensorSource* bias,
                             int size, float eps, HeadStage::Kind kind);

// Fills in the embedding (or the classifier of a modular cross-encoder), and the prompts. Does
// nothing for a folder without these files.
Status read_pipeline(const std::string& folder, int hidden, PooledHeads& heads);
// matryoshka_dimensions, or is_matryoshka: any size down to one.
void read_matryoshka(const json::Value& config, PooledHeads& heads);

}  // namespace freshet::models

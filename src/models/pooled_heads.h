// Reads the heads of embedders and classifiers (layers/pooled_head.h).
//
// Embeddings: the pipeline of sentence-transformers (modules.json and the folders that it names,
// config_sentence_transformers.json), or `pooling_type` of a GGUF file. Without either, encoders
// pool by the mean and decoders by the last token, and vectors have length 1. Classifiers: the
// weights of the ...ForSequenceClassification classes of transformers, llama.cpp's "cls" tensors,
// or rows of a language model's head, the tokens of which are named by `classifier_from_token` in
// the configuration (vLLM's key) or by a LogitScore module. Errors name the file or the tensor.
#pragma once

#include <optional>
#include <string_view>

#include "base/thread_pool.h"
#include "layers/pooled_head.h"
#include "layers/spec.h"
#include "loader/checkpoint.h"

namespace freshet::models {

// Whether the configuration names a class whose head gives scores.
bool is_classifier(const json::Value& config);

// `token_id`: the id of a token as the vocabulary spells it.
using TokenId = FunctionRef<std::optional<int32_t>(std::string_view token)>;
Result<PooledHeads> read_pooled_heads(const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                                      TokenId token_id);

}  // namespace freshet::models

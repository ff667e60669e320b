// Classifiers that are rows of a language model's head: the score of a text is the logit of one
// token at its end less that of another, such as "yes" and "no" (Qwen3-Reranker). Errors name the
// key or the tensor. Pure, but for reading weights.
#pragma once

#include <string_view>

#include "base/status.h"
#include "layers/pooled_head.h"
#include "layers/spec.h"
#include "loader/checkpoint.h"
#include "models/pooled_heads.h"

namespace freshet::models {

// The key of config.json: a list of tokens. Two are compared, the second one for the score, unless
// "method" is "no_post_processing"; otherwise each is a label of its own.
inline constexpr std::string_view kAnswerTokensKey = "classifier_from_token";

// Fills in the classifier from the configuration, or else from heads.answer_tokens.
Status read_answer_head(const loader::Checkpoint& checkpoint, const ModelSpec& spec,
                        TokenId token_id, PooledHeads& heads);

// A head of two rows becomes one: the first less the second. REQUIRES: a linear layer of two rows.
void compare_answers(PooledHead& head);

}  // namespace freshet::models

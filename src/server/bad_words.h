// vLLM's `bad_words`: words that an answer must not contain, as sequences of tokens. Pure.
#pragma once

#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"

namespace freshet::server {

// The sequences that spell the word: at the beginning of a text, and after a space where that makes
// other tokens. As in vLLM, the second one counts only if it is as long as the first. Empty if the
// word has no tokens.
std::vector<std::vector<int32_t>> sequences_of(const tokenizer::Tokenizer& tokenizer,
                                               const std::string& word);

}  // namespace freshet::server

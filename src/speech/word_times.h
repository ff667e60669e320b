// When each word of a transcript is said: a decoder's weights of cross-attention show where in the
// sound it looks for its next token, and dynamic time warping finds the path through them (arXiv:
// 2212.04356, section 2.3 of OpenAI's code; the arithmetic of transformers). Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layers/cross_weights.h"
#include "tokenizer/tokenizer.h"

namespace freshet::speech {

struct Word {
  std::string text;               // without white space around it
  double start = 0.0, end = 0.0;  // seconds
};

// For each of the tokens at the decoder's positions [first, first + count) the position of the
// encoder where it ends and the next one begins. `columns`: positions that hold the sound. `width`:
// of the median filter, odd.
std::vector<int64_t> token_ends(const CrossWeights& weights, int64_t first, int64_t count,
                                int64_t columns, int width);

// Groups tokens to words. `ends[i]`: when token i ends, in seconds; `begin`: when the first begins.
// `language`: its code; some are written without spaces.
std::vector<Word> words_of(const Tokenizer& tokenizer, std::span<const int32_t> tokens,
                           std::span<const double> begins, std::span<const double> ends,
                           const std::string& language);

}  // namespace freshet::speech

// The part of a configuration that BERT and its relatives share.
#pragma once

#include <string_view>

#include "models/decoder_config.h"

namespace freshet::models {

// As decoder_spec(), but every token sees the whole text, branches are normalised after the
// residual sum, so are the embeddings, and there is no head over the vocabulary. Learned positions
// if `defaults.rotary` is not set.
ModelSpec encoder_spec(Config& config, std::string_view name, const DecoderDefaults& defaults);

// Positions of RoBERTa begin behind the id of its padding token.
void offset_positions(Config& config, ModelSpec& spec);

}  // namespace freshet::models

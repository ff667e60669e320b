// The parts of a Hugging Face tokenizer.json, one function per part. Errors name the key at fault.
#pragma once

#include "base/json.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {

Status parse_hf_normalizer(const json::Value& value, TokenizerParts& parts);
Status parse_hf_pre_tokenizer(const json::Value& value, TokenizerParts& parts);
Status parse_hf_decoder(const json::Value& value, TokenizerParts& parts);
Status parse_hf_post_processor(const json::Value& value, TokenizerParts& parts);
// Call after the pre-tokenizer is read: a byte-level model takes over its last step. model_count is
// the number of strings in the model's vocabulary.
Status parse_hf_model(const json::Value& value, TokenizerParts& parts, size_t& model_count);
// Call after all others.
Status parse_hf_added_tokens(const json::Value& value, size_t model_count, TokenizerParts& parts);

}  // namespace freshet::tokenizer

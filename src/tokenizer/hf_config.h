// The files next to a vocabulary in a Hugging Face folder: tokenizer_config.json,
// special_tokens_map.json, chat templates, generation_config.json. Errors name the file.
#pragma once

#include <filesystem>

#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {

// `json_vocabulary`: the vocabulary is a tokenizer.json, which lists its added tokens itself.
Status read_hf_config(const std::filesystem::path& directory, bool json_vocabulary,
                      TokenizerParts& parts);

}  // namespace freshet::tokenizer

// Fill-in-the-middle prompts, as llama-server's /infill builds them.
//
// Pure: a vocabulary and texts in, token ids out. Models mark the parts with special tokens that
// each family spells differently; a vocabulary that lacks one of the three cannot infill.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/openai_request.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {

struct InfillFile {
  std::string filename;
  std::string text;
};

struct InfillRequest {
  std::string prefix;              // the text before the cursor...
  std::string prompt;              // ...and what has been typed there
  std::string suffix;              // the text after the cursor
  std::vector<InfillFile> extras;  // other files, the most important last
};

// Reads input_prefix, input_suffix, input_extra and prompt.
Parsed<InfillRequest> parse_infill(const json::Value& body);

// At most `max_tokens` ids: of what is too long, the oldest of the extras, the beginning of the
// prefix and the end of the suffix go. 501 when the vocabulary has no such tokens.
Parsed<std::vector<int32_t>> infill_prompt(const tokenizer::Tokenizer& tokenizer,
                                           const InfillRequest& request, size_t max_tokens);

}  // namespace freshet::server

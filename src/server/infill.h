// Fill-in-the-middle prompts, in the format of llama-server's /infill.
//
// Pure functions: a vocabulary and texts in, token ids out. Models mark prefix, suffix and middle
// with special tokens, which differ between families. A vocabulary needs all three for infill.
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
  std::string prefix;              // the text before the cursor
  std::string prompt;              // the text typed at the cursor
  std::string suffix;              // the text after the cursor
  std::vector<InfillFile> extras;  // other files, the most important one last
};

// Reads input_prefix, input_suffix, input_extra and prompt.
Parsed<InfillRequest> parse_infill(const json::Value& body);

// At most `max_tokens` ids. Input that is too long is cut: first the beginning of the extras, then
// the beginning of the prefix and the end of the suffix. 501 if the vocabulary lacks the tokens.
Parsed<std::vector<int32_t>> infill_prompt(const tokenizer::Tokenizer& tokenizer,
                                           const InfillRequest& request, size_t max_tokens);

}  // namespace freshet::server

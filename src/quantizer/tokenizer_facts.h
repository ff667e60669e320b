// Which features of a tokenizer.json GGUF's own keys can express, and which they cannot.
//
// Pure functions over the parsed file, which Tokenizer::load() has already accepted.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace freshet::quantizer {

struct TokenizerFacts {
  bool sentencepiece = false;  // tokenizer.ggml.model: "llama" if set, else "gpt2"
  std::string pre;             // gpt2: tokenizer.ggml.pre
  bool space_prefix = false;   // llama: tokenizer.ggml.add_space_prefix
  // Steps and rules that GGUF has no key for: "normalizer NFC", "add_prefix_space" ...
  std::vector<std::string> unsaid;
};

// Refuses tokenizers that have no name in tokenizer.ggml.pre or .model.
Result<TokenizerFacts> read_tokenizer_facts(const json::Value& root);

}  // namespace freshet::quantizer

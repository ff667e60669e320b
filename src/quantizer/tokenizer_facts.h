// What GGUF's own keys can say of a tokenizer.json, and what they cannot.
//
// Pure functions over the parsed file, which Tokenizer::load() has accepted before.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace freshet::quantizer {

struct TokenizerFacts {
  bool sentencepiece = false;  // tokenizer.ggml.model "llama", else "gpt2"
  std::string pre;             // gpt2: tokenizer.ggml.pre
  bool space_prefix = false;   // llama: tokenizer.ggml.add_space_prefix
  // Steps and rules that GGUF has no key for: "normalizer NFC", "add_prefix_space" ...
  std::vector<std::string> unsaid;
};

// Refuses what tokenizer.ggml.pre or .model have no name for.
Result<TokenizerFacts> read_tokenizer_facts(const json::Value& root);

}  // namespace freshet::quantizer

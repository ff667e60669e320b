// Tokens that are found in the text before anything else is done to it.
//
// Matches are leftmost, then longest, as in Hugging Face's added vocabulary. A match that its
// token's rules forbid (single_word, or special while specials are not wanted) is text. Immutable
// once built; safe from many threads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/trie.h"

namespace freshet::tokenizer {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false;
  bool normalized = false;  // looked for after normalisation
  bool special = false;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // Tokens with an empty content are never found.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }

  // Cuts `text` at its added tokens and calls, in order, on_token with their ids and on_text with
  // what lies between (never empty). `context` is the text's own.
  void split(std::string_view text, bool parse_special, const PieceContext& context,
             FunctionRef<void(int32_t)> on_token,
             FunctionRef<void(std::string_view, const PieceContext&)> on_text) const;

 private:
  bool allowed(const AddedToken& token, std::string_view text, size_t begin, size_t end,
               bool parse_special) const;
  std::vector<AddedToken> tokens_;
  Trie trie_;  // of indices into tokens_
};

}  // namespace freshet::tokenizer

// Added tokens: found in the text before any other processing.
//
// The leftmost match wins, then the longest, as in Hugging Face's added vocabulary. A match that
// the token's rules forbid (single_word, or a special token while specials are not parsed) is
// treated as text. Immutable once built; safe from many threads.
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
  bool normalized = false;  // matched after normalisation
  bool special = false;
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // Tokens with empty content are never found.
  explicit AddedTokens(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }

  // Splits `text` at its added tokens. Calls on_token with the id of each token and on_text with
  // the text between tokens (never empty), in order. `context` describes the position of `text`.
  void split(std::string_view text, bool parse_special, const PieceContext& context,
             FunctionRef<void(int32_t)> on_token,
             FunctionRef<void(std::string_view, const PieceContext&)> on_text) const;

 private:
  bool allowed(const AddedToken& token, std::string_view text, size_t begin, size_t end,
               bool parse_special) const;
  std::vector<AddedToken> tokens_;
  Trie trie_;  // values are indices into tokens_
};

}  // namespace freshet::tokenizer

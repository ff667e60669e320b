// The unigram language model (Kudo, 2018): finds the most likely segmentation of a word into tokens
// by Viterbi's algorithm, in time linear in the word.
//
// Two variants differ in arithmetic and in the treatment of unknown characters: SentencePiece's
// (single precision) and Hugging Face's (double precision).
#pragma once

#include <array>
#include <vector>

#include "tokenizer/model.h"
#include "tokenizer/trie.h"
#include "tokenizer/vocab.h"

namespace freshet::tokenizer {

struct UnigramOptions {
  bool single_precision = false;  // as SentencePiece
  bool byte_fallback = false;
  int32_t unknown = -1;  // -1: unknown characters are dropped
};

class UnigramModel : public Model {
 public:
  struct Token {
    std::string_view text;
    int32_t id;
    double score;
    bool user_defined = false;  // always preferred: its score beats all others
  };
  // `keys` maps whole strings and <0xXX> to ids. The map and the texts must outlive the model.
  UnigramModel(UnigramOptions options, const std::vector<Token>& tokens, const TokenMap& keys);

  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const override;

 private:
  // The best path to an offset.
  struct Node {
    double score = 0;
    uint32_t from = 0;
    int32_t id = -1;
    bool reached = false;
  };
  void emit_unknown(std::string_view text, std::vector<int32_t>& out) const;

  UnigramOptions options_;
  const TokenMap& keys_;
  Trie trie_;                   // values are indices into scores_
  std::vector<double> scores_;  // per token: its score; user-defined: score per byte
  std::vector<int32_t> ids_;
  std::vector<bool> user_defined_;
  double unknown_score_ = 0, max_score_ = 0;
  std::array<int32_t, 256> byte_tokens_;
};

}  // namespace freshet::tokenizer

// WordPiece (Wu et al., 2016): greedy longest match; and WordLevel: the whole word or unknown.
#pragma once

#include <vector>

#include "tokenizer/model.h"
#include "tokenizer/vocab.h"

namespace freshet::tokenizer {

class WordPieceModel : public Model {
 public:
  // `starts` holds the tokens that begin words, `rest` the continuation tokens (without their
  // prefix). Words of more than max_chars characters are unknown. unknown -1: unknown words are
  // dropped.
  WordPieceModel(TokenMap starts, TokenMap rest, int32_t unknown, size_t max_chars)
      : starts_(std::move(starts)),
        rest_(std::move(rest)),
        unknown_(unknown),
        max_chars_(max_chars) {}

  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const override;

 private:
  bool cut(std::string_view word, std::vector<int32_t>& out) const;
  TokenMap starts_, rest_;
  int32_t unknown_;
  size_t max_chars_;
};

class WordLevelModel : public Model {
 public:
  WordLevelModel(const TokenMap& keys, int32_t unknown) : keys_(keys), unknown_(unknown) {}
  void encode(std::string_view word, Scratch&, std::vector<int32_t>& out) const override {
    const int32_t id = keys_.find(word);
    if (id >= 0 || unknown_ >= 0) out.push_back(id >= 0 ? id : unknown_);
  }

 private:
  const TokenMap& keys_;
  int32_t unknown_;
};

}  // namespace freshet::tokenizer

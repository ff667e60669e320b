// SentencePiece vocabularies, from a tokenizer.model (sentencepiece_model.proto) or from GGUF.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {

struct SentencePiece {
  enum class Type { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };
  std::string_view text;
  float score = 0;
  Type type = Type::kNormal;
};

struct SentencePieceModel {
  std::vector<SentencePiece> pieces;  // by id
  bool unigram = true;                // or BPE
  bool byte_fallback = false;
  bool by_scores_in_double = false;  // unigram: sums scores in double precision
  std::string unknown_surface = " \xE2\x81\x87 ";
  SentencePieceRules rules;  // build_sentencepiece fills in user_defined
};

// Fills in vocab, normalizer, model, kinds and bytes; decoding hides control tokens.
Status build_sentencepiece(SentencePieceModel model, TokenizerParts& parts);

}  // namespace freshet::tokenizer

// Two vocabularies that share tokens: what one model wrote, as ids of another (token-level
// intersection, arXiv:2502.05202).
//
// A token of the target is the draft model's token with the same bytes, or else those that its
// tokenizer makes of the bytes, if these are whole characters. The draft model may propose only
// tokens that both have. Immutable.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "tokenizer/tokenizer.h"

namespace freshet::speculative {

class VocabularyMap {
 public:
  // Errors: the vocabularies share too little to be of use.
  static Result<VocabularyMap> make(const tokenizer::Tokenizer& target, int target_vocab,
                                    const tokenizer::Tokenizer& draft, int draft_vocab);

  // Appends the draft model's ids of a token of the target.
  void translate(int32_t target_id, std::vector<int32_t>& ids) const;
  // [draft vocabulary] the target's id; -1: it has no such token.
  std::span<const int32_t> target_ids() const { return target_ids_; }

 private:
  std::vector<int32_t> target_ids_;
  // [target vocabulary + 1] where the ids of each token begin in parts_.
  std::vector<uint32_t> first_;
  std::vector<int32_t> parts_;
};

}  // namespace freshet::speculative

// Tokens that must not come next: bad words, tokens that cannot open the output, repeated n-grams.
//
// A function of the parameters and of the sequence's own tokens. A bad word of one token is never
// put out; the last token of a longer one cannot follow its other tokens: in the output
// (bad_words, vLLM's rule), or in prompt and output (bad_words_ids, transformers' rule). With
// no_repeat_ngram_size n, the last n - 1 tokens cannot be followed by a token that followed them
// before, in the prompt or the output (transformers' rule). Immutable; thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "freshet/engine.h"

namespace freshet {

class TokenBans {
 public:
  TokenBans() = default;
  // Ids that are not in the vocabulary are left out.
  TokenBans(const SamplingParams& params, int64_t vocab, std::span<const int32_t> prompt);

  // Whether the output's tokens decide, and not only whether there are any.
  bool reads_output() const { return !sequences_.empty() || ngram_ > 0; }
  size_t most() const;  // upper bound of what list() appends to an output of no tokens
  // Appends the ids that must not follow `output`; some may occur twice.
  void list(std::span<const int32_t> output, std::vector<int32_t>& ids) const;
  // The same for an output of this many tokens. REQUIRES: !reads_output().
  void list(int64_t outputs, std::vector<int32_t>& ids) const;

 private:
  struct Sequence {
    std::vector<int32_t> ids;  // two or more
    bool from_prompt = false;  // it may begin there
  };
  void add(const std::vector<int32_t>& word, bool from_prompt);
  void list_repeats(std::span<const int32_t> output, std::vector<int32_t>& ids) const;
  // Token i of prompt and output.
  int32_t token(std::span<const int32_t> output, int64_t i) const;

  int64_t vocab_ = 0;
  std::vector<int32_t> single_;
  std::vector<int32_t> at_begin_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> prompt_;  // if it counts
  int64_t ngram_ = 0;
};

}  // namespace freshet

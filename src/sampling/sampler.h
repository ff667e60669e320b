// Chooses the next token of one sequence from its logits.
//
// In order: masks, penalties, logit bias, bans, temperature, min-p, top-k, top-p, typical. Each
// filter works on the tokens that the previous one kept, renormalised. At temperature 0 (or below
// 1e-5) sampling is greedy. Ties go to the lowest id; top-k keeps exactly k tokens. The token is
// drawn by an exponential race over the tokens that are left (race.h), whose noise is a function of
// (seed, sample, position, token id). The result is a function of these, of the logits and of the
// sequence's own tokens, never of a batch or of threads. "Locally typical sampling": Meister et
// al., 2023; min-p: Nguyen et al., 2024; repetition penalty: Keskar et al., 2019.
//
// One Sampler per sequence, used by one thread at a time. SamplerScratch may be shared by all
// samplers that one thread runs. Neither allocates after construction, except for the list of
// logprobs.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "freshet/engine.h"
#include "ops/sample.h"
#include "sampling/logits.h"
#include "sampling/params.h"
#include "sampling/token_bans.h"
#include "sampling/token_counts.h"

namespace freshet {

struct SamplerScratch {
  explicit SamplerScratch(int64_t vocab) : row(vocab) {}
  LogitScratch row;
};

// The allowed tokens: bit (id % 32) of word (id / 32). Empty: all.
using TokenMask = std::span<const uint32_t>;

class Sampler {
 public:
  // Each purpose of a draw has its own random numbers. 0 stands for the race.
  enum class Purpose : uint32_t { kAccept = 1, kResample = 2, kDraft = 3 };

  // REQUIRES: find_error(params, vocab) finds none. `index` is which of the n samples this is.
  // `max_output` bounds the accept() calls. `stop_ids` (end of text and the request's stop tokens)
  // cannot be sampled before params.min_tokens tokens.
  Sampler(const SamplingParams& params, int64_t vocab, uint64_t seed, uint32_t index,
          std::span<const int32_t> prompt, int64_t max_output, std::vector<int32_t> stop_ids);

  // The token for `position` (of the whole sequence, prompt included). Changes `logits`. Returns -1
  // if no token is possible (every logit is -inf or NaN, or the mask is empty). `logprobs`:
  // nullptr, or filled with the sampled token and the params.logprobs best, by log-softmax of the
  // raw logits.
  int32_t sample(std::span<float> logits, int64_t position, SamplerScratch& s, TokenMask mask = {},
                 std::vector<TokenLogprob>* logprobs = nullptr);
  // The sampling descriptor of what sample() would do, so that a device can do it: false where it
  // cannot (the row says kNotHere then). Lists are appended to `words`. `unseen`: the
  // number of tokens that were put out, or are assumed to be (drafts), without a call of accept().
  // If penalties depend on it, a single such token is the row's own token of the batch, and
  // `row.last` is 0; more than one cannot be described.
  bool describe(int64_t position, TokenMask mask, int unseen, ops::SampleRow& row,
                std::vector<int32_t>& words) const;
  // `id` is part of the output now.
  void accept(int32_t id);

  // The distribution that sample() draws from, up to a common factor; valid until the scratch is
  // used again. At temperature 0 it is one token. Changes `logits`. Empty if no token is
  // possible.
  std::span<const Candidate> distribution(std::span<float> logits, SamplerScratch& s,
                                          TokenMask mask = {});
  uint64_t bits(int64_t position, Purpose purpose) const;
  bool greedy() const;

 private:
  bool keeps_output() const { return params_.rules != nullptr || bans_.reads_output(); }
  bool may_end(int64_t outputs) const { return outputs >= params_.min_tokens; }
  float cut() const;  // min-p keeps logits down to the maximum plus this
  void adjust(std::span<float> logits, TokenMask mask);
  void change(std::span<float> logits, int32_t id, float value);
  // Fills s.row.candidates with weights; returns their sum.
  Weight filter(std::span<const float> logits, float maximum, SamplerScratch& s) const;
  int32_t draw(std::span<const float> logits, float maximum, int64_t position,
               SamplerScratch& s) const;

  SamplingParams params_;
  int64_t vocab_;
  uint64_t seed_;
  uint32_t index_;
  int64_t outputs_ = 0;
  std::vector<int32_t> stop_ids_;             // within the vocabulary
  std::vector<ops::SampleRow::Bias> biases_;  // each id once
  bool penalties_ = false;
  TokenCounts counts_;                            // unused without penalties
  std::vector<int32_t> said_;                     // the output, if rules or bans read it
  std::vector<std::pair<int32_t, float>> saved_;  // raw logits of what adjust() changed, in order
  TokenBans bans_;
  std::vector<int32_t> banned_;    // of the current token
  std::vector<uint32_t> allowed_;  // a mask of params_.allowed_token_ids, or empty
};

// Log-probabilities by the raw logits: `chosen` first (unless < 0), then the `count` best. Returns
// the log of the sum of exp(logits). For prompts' logprobs too.
double raw_logprobs(std::span<const float> logits, int32_t chosen, int count, SamplerScratch& s,
                    std::vector<TokenLogprob>& out);

}  // namespace freshet

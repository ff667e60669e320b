// How tokens are drawn: an exponential race, which is the Gumbel-max trick in another form
// (docs/sampling.md): -ln(E / w) is ln(w) plus Gumbel noise, so the lowest time has the largest
// perturbed log-weight.
//
// A candidate with weight w takes the time E / w, and the first candidate is drawn; ties go to the
// lowest id. E = -ln(1 - v) is an exponential variate, and v is 64 bits of noise: a function of
// (seed, sample, position, token id) alone, and thus independent of the logits, of the filters, of
// the batch and of which other candidates are there. A candidate is drawn with its share of the
// weights; the error of all probabilities together is below 2^-40. CPUs of every instruction set
// and GPUs draw the same token (ops/race.h).
//
// Drafters race over their own distribution with the seed, the sample and the position of the
// request for which they draft. Then draft and token are equal with probability
// sum over x of 1 / (sum over y of max(p(y) / p(x), q(y) / q(x))), at least (1 - d) / (1 + d) where
// d is the total variation distance of the two distributions p and q. The ids must be those of the
// target's vocabulary: a drafter with another one gives winner() candidates with mapped ids. Any
// weights will do, up to a common factor. A drafter whose logits need the usual filters owns a
// Sampler with the same seed and index instead.
//
// Immutable; may be used by several threads.
#pragma once

#include <cstdint>
#include <span>

#include "ops/race.h"
#include "sampling/logits.h"

namespace freshet {

class Race {
 public:
  // `sample`: which of the n samples of the request. `position`: of the token to be drawn in the
  // whole sequence, prompt included.
  Race(uint64_t seed, uint32_t sample, int64_t position);

  uint64_t noise(int32_t token) const;
  // Candidates in any order, each id once and not negative; those of weight 0 cannot win.
  // -1 if there is no other.
  int32_t winner(std::span<const Candidate> candidates) const;
  // The same, where every token of a row is a candidate with the weight
  // whole(exp_fraction((logit - maximum) * scale)). Overwrites s.weight and s.block_sum.
  // REQUIRES: find_maxima() returned `maximum`, which is finite.
  int32_t winner(std::span<const float> logits, float maximum, float scale, LogitScratch& s) const;
  // For a device that races itself (ops/sample.h).
  const ops::RaceStream& stream() const { return stream_; }

 private:
  ops::RaceStream stream_;
};

}  // namespace freshet

// Passes over a row of logits: maxima, exponentials, selection of the best. No row is ever sorted.
//
// All are pure functions of the row. A token's weight is an integer, so sums are exact in any
// order, and a sampler on a GPU (ops/sample.h) finds the same tokens with any number of threads. A
// NaN counts as minus infinity. LogitScratch is sized once for a vocabulary and then reused;
// nothing here allocates after that.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace freshet {

// exp(logit - maximum) in units of 2^-44, rounded to nearest: 2^44 for the best token.
using Weight = uint64_t;
constexpr int kWeightBits = 44;
constexpr int64_t kMostVocab = int64_t{1} << 19;  // all weights together fit 64 bits

// A possible token. `weight` is its probability, up to a common factor.
struct Candidate {
  int32_t id = 0;
  float logit = 0.0f;
  Weight weight = 0;
};

// Best first; ties go to the lowest id.
inline bool better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

constexpr int64_t kLogitBlock = 128;

struct LogitScratch {
  explicit LogitScratch(int64_t vocab);

  std::vector<float> block_max;       // [blocks]
  std::vector<float> block_order;     // [blocks], for selection
  std::vector<Weight> block_sum;      // [blocks]
  std::vector<float> weight;          // [vocab], as fractions
  std::vector<Candidate> candidates;  // capacity: 2 * vocab + 1
};

// Fills s.block_max; returns the maximum of the row (-inf if no token is possible).
float find_maxima(std::span<const float> logits, LogitScratch& s);
// The lowest id that holds the maximum; -1 when every logit is -inf. REQUIRES: find_maxima().
int32_t argmax(std::span<const float> logits, const LogitScratch& s);
// exp(x) for x <= 0 (a NaN: 0) as a fraction, and the integer weight of a fraction.
float exp_fraction(float x);
Weight whole(float fraction);
// s.weight[i] = exp((logits[i] - maximum) * scale), s.block_sum the sums of whole(s.weight) of each
// block; returns the total.
Weight exponentials(std::span<const float> logits, float maximum, float scale, LogitScratch& s);
// s.weight[b] = exp((s.block_max[b] - maximum) * scale). Overwrites s.block_sum.
void exponentials_of_blocks(float maximum, float scale, LogitScratch& s);
// Computes the sums only; s.weight is not written.
Weight exponential_sums(std::span<const float> logits, float maximum, float scale, LogitScratch& s);
// s.candidates: every token whose logit is at least `threshold` (and above -inf), in order of id.
// REQUIRES: find_maxima().
void gather_above(std::span<const float> logits, float threshold, LogitScratch& s);
// s.candidates: the `count` best tokens, best first; fewer if fewer are possible.
// REQUIRES: find_maxima().
void gather_best(std::span<const float> logits, int64_t count, LogitScratch& s);
// log of the sum of exp(logits). REQUIRES: find_maxima(). Overwrites s.block_sum.
double log_sum_exp(std::span<const float> logits, float maximum, LogitScratch& s);

}  // namespace freshet

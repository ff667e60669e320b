// Passes over a row of logits: maxima, exponentials, selection of the best. No row is ever sorted.
//
// All are pure functions of the row: blocks and lanes have fixed sizes, so the sums have the same
// bits on every processor and however many threads the engine has. A NaN counts as minus infinity.
// LogitScratch is sized once for a vocabulary and then reused; nothing here allocates after that.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace freshet {

// A token that may be chosen. `weight` is its share, up to a common factor.
struct Candidate {
  int32_t id = 0;
  float logit = 0.0f;
  double weight = 0.0;
};

// Best first; of equals the lowest id.
inline bool better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

constexpr int64_t kLogitBlock = 128;

struct LogitScratch {
  explicit LogitScratch(int64_t vocab);

  std::vector<float> block_max;       // [blocks]
  std::vector<float> block_order;     // [blocks], for selection
  std::vector<double> block_sum;      // [blocks]
  std::vector<float> weight;          // [vocab]
  std::vector<Candidate> candidates;  // capacity: vocab
};

// Fills s.block_max; returns the maximum of the row (-inf when nothing is possible).
float find_maxima(std::span<const float> logits, LogitScratch& s);
// The lowest id that holds the maximum; -1 when every logit is -inf. REQUIRES: find_maxima().
int32_t argmax(std::span<const float> logits, const LogitScratch& s);
// s.weight[i] = exp((logits[i] - maximum) * scale), s.block_sum their sums a block; returns the
// total.
double exponentials(std::span<const float> logits, float maximum, float scale, LogitScratch& s);
// s.candidates: every token whose logit is at least `threshold` (and above -inf), in order of id.
// REQUIRES: find_maxima().
void gather_above(std::span<const float> logits, float threshold, LogitScratch& s);
// s.candidates: the `count` best tokens, best first; fewer when fewer are possible.
// REQUIRES: find_maxima().
void gather_best(std::span<const float> logits, int64_t count, LogitScratch& s);
// log of the sum of exp(logits). REQUIRES: find_maxima(). Overwrites s.weight.
double log_sum_exp(std::span<const float> logits, float maximum, LogitScratch& s);

}  // namespace freshet

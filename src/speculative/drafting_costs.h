// How long a drafter takes: a round gives one more draft to each of several sequences.
//
// Learned from its calls. Sequences that the drafter has not followed for a while, or never, cost
// it their tokens besides (a prompt that a draft model has to read). Not thread-safe. Seconds.
#pragma once

#include <array>
#include <cstdint>

namespace freshet::speculative {

class DraftingCosts {
 public:
  // `unknown`: of a round, before anything is known.
  explicit DraftingCosts(double unknown) : unknown_(unknown) {}

  // A call of `rounds` rounds of `rows` drafts in all, which read `missed` tokens besides.
  void add(int rounds, int rows, int64_t missed, double seconds);
  double round(int sequences) const;
  double missed_token() const { return missed_; }
  bool known() const { return known_; }

 private:
  double unknown_;
  std::array<double, 16> rounds_{};  // by doublings of sequences; 0: unknown
  double missed_ = 0.0;
  bool known_ = false;
};

}  // namespace freshet::speculative

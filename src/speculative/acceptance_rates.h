// How likely drafts are to be accepted, learned from those of the past.
//
// A rate is that of a draft whose predecessors in its step were all accepted. Rates by position are
// shared by all sequences, so that a new one starts with them; a sequence has a factor of its own,
// which is forgotten while it drafts nothing. Both follow the recent past. Not thread-safe.
#pragma once

#include <array>
#include <span>

namespace freshet::speculative {

class AcceptanceRates {
 public:
  static constexpr int kPositions = 64;

  // A sequence's own part.
  struct Own {
    double accepted = 0.0;
    double expected = 0.0;  // by the shared rates
    void forget(double share);
  };

  // Of `drafted` tokens of a step the first `accepted` were right. `rare`: a single draft after a
  // long time without, which counts for more.
  void add(Own& own, int accepted, int drafted, bool rare = false);
  // The probability that the first i + 1 drafts are all accepted, for each i of `out`.
  void survival(const Own& own, std::span<double> out) const;
  // How many drafts of first positions the shared rates know of, of the recent past.
  double known() const { return shared_[0].tried; }

 private:
  struct Shared {
    double accepted = 0.0;
    double tried = 0.0;
  };

  std::array<Shared, kPositions> shared_{};
};

}  // namespace freshet::speculative

#include "speculative/drafting_costs.h"

#include <algorithm>
#include <cmath>

namespace freshet::speculative {
namespace {

constexpr double kRoundRate = 0.1;
constexpr double kMissedRate = 0.3;

size_t doublings(double sequences) {
  return static_cast<size_t>(std::clamp(std::lround(std::log2(std::max(1.0, sequences))), 0L, 15L));
}

}  // namespace

void DraftingCosts::add(int rounds, int rows, int64_t missed, double seconds) {
  rounds = std::max(rounds, 1);
  const double mean = static_cast<double>(rows) / rounds;
  if (missed > 0) {
    if (!known_) return;
    const double each = std::max(0.0, seconds - rounds * round(static_cast<int>(mean))) /
                        static_cast<double>(missed);
    missed_ = missed_ == 0.0 ? each : missed_ + kMissedRate * (each - missed_);
    return;
  }
  double& at = rounds_[doublings(mean)];
  const double each = std::max(seconds / rounds, 1e-9);
  // A call that took long because of other programs counts little.
  at = at == 0.0 ? each : at * std::exp(kRoundRate * std::clamp(std::log(each / at), -1.0, 1.0));
  known_ = true;
}

// Of the nearest number of sequences that is known; more of them are assumed to cost more.
double DraftingCosts::round(int sequences) const {
  if (!known_) return unknown_;
  const size_t at = doublings(sequences);
  for (size_t d = 0; d < rounds_.size(); ++d) {
    if (at >= d && rounds_[at - d] > 0.0)
      return rounds_[at - d] * (0.9 + 0.1 * std::exp2(static_cast<double>(d)));
    if (at + d < rounds_.size() && rounds_[at + d] > 0.0) return rounds_[at + d];
  }
  return unknown_;
}

}  // namespace freshet::speculative

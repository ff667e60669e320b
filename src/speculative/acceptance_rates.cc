#include "speculative/acceptance_rates.h"

#include <algorithm>

namespace freshet::speculative {
namespace {

constexpr double kFirstGuess = 0.6;   // of a drafter of which nothing is known
constexpr double kGuessWeight = 1.0;  // in drafts
constexpr double kSharedMemory = 0.98;
constexpr double kRareMemory = 0.9;
constexpr double kOwnMemory = 0.96;
constexpr double kOwnWeight = 10.0;  // drafts until a sequence's own past counts as much

// A position of which little is known is like the one before it.
double rate_after(double before, double accepted, double tried) {
  return (accepted + kGuessWeight * before) / (tried + kGuessWeight);
}

}  // namespace

void AcceptanceRates::Own::forget(double share) {
  accepted *= 1.0 - share;
  expected *= 1.0 - share;
}

void AcceptanceRates::add(Own& own, int accepted, int drafted, bool rare) {
  own.forget(1.0 - kOwnMemory);
  double rate = kFirstGuess;
  for (int i = 0; i < std::min(drafted, kPositions) && i <= accepted; ++i) {
    const double right = i < accepted ? 1.0 : 0.0;
    Shared& s = shared_[static_cast<size_t>(i)];
    rate = rate_after(rate, s.accepted, s.tried);
    own.expected += rate;
    own.accepted += right;
    const double memory = rare ? kRareMemory : kSharedMemory;
    s.accepted = s.accepted * memory + right;
    s.tried = s.tried * memory + 1.0;
  }
}

void AcceptanceRates::survival(const Own& own, std::span<double> out) const {
  const double factor = (own.accepted + kOwnWeight) / (own.expected + kOwnWeight);
  double rate = kFirstGuess, all = 1.0;
  for (size_t i = 0; i < out.size(); ++i) {
    if (i < shared_.size()) rate = rate_after(rate, shared_[i].accepted, shared_[i].tried);
    out[i] = all *= std::clamp(rate * factor, 0.005, 0.995);
  }
}

}  // namespace freshet::speculative

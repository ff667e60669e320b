// What steps without drafts take on a device, where they run ahead: the host reads one step's
// tokens while the device computes the next. Steps with drafts do not, and neither does a single
// plain step between them. So the time of plain steps is measured in bursts of them, for each size
// of a batch by powers of two. Used by one thread; it reads no clock.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "speculative/draft_lengths.h"

namespace freshet::speculative {

class PlainSteps {
 public:
  // Before a step, if nothing runs ahead of it: whether it begins or goes on with a burst, and must
  // have no drafts.
  bool take(size_t sequences);
  // Whether the step that runs belongs to a burst, and so the next one may be started behind it.
  bool more() const { return left_ > 0; }
  // After each step; `ahead`: it had no drafts, and the next one was started behind it.
  void done(const StepDone& step, bool ahead);
  // The time of plain steps that run ahead as a share of `seconds`, what a single one takes; at
  // most 1, and 1 if it is not known.
  double share(size_t sequences, double seconds) const;

 private:
  static constexpr int kBurst = 10;
  static constexpr int kBegin = 3;            // steps until all run ahead
  static constexpr int64_t kBetween = 2'000;  // steps
  struct Size {
    double token = 0.0;  // seconds of a step for each sequence; 0: not known
    int64_t due = 0;     // the step at which the next burst begins
  };
  static size_t size_of(size_t sequences) {
    return std::min<size_t>(static_cast<size_t>(std::bit_width(sequences)), 15);
  }

  std::array<Size, 16> sizes_;
  int64_t steps_ = 0;
  int left_ = 0;   // of a burst
  int ahead_ = 0;  // steps in a row that ran ahead
};

}  // namespace freshet::speculative

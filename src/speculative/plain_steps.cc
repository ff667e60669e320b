#include "speculative/plain_steps.h"

#include <algorithm>

namespace freshet::speculative {

bool PlainSteps::take(size_t sequences) {
  Size& size = sizes_[size_of(sequences)];
  if (left_ == 0 && steps_ >= size.due) {
    left_ = kBurst;
    size.due = steps_ + kBetween;
  }
  return left_ > 0;
}

void PlainSteps::done(const StepDone& step, bool ahead) {
  ++steps_;
  left_ = std::max(0, left_ - 1);
  if (!ahead || step.drafted > 0 || step.prompt_tokens > 0 || step.shape.sequences <= 0) {
    ahead_ = 0;
    return;
  }
  if (++ahead_ <= kBegin) return;
  Size& size = sizes_[size_of(static_cast<size_t>(step.shape.sequences))];
  const double token = step.seconds / static_cast<double>(step.shape.sequences);
  size.token = size.token == 0.0 ? token : size.token + 0.2 * (token - size.token);
  size.due = steps_ + kBetween;
}

double PlainSteps::share(size_t sequences, double seconds) const {
  const double token = sizes_[size_of(sequences)].token;
  if (token == 0.0 || seconds <= 0.0) return 1.0;
  return std::min(1.0, token * static_cast<double>(sequences) / seconds);
}

}  // namespace freshet::speculative

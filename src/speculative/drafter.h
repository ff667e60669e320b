// Proposes tokens for sequences ahead of the model, which verifies them in its next step.
//
// The step loop asks for drafts before it schedules a step, for all sequences at once, so that a
// draft model can run them as one batch. A wrong proposal costs time, never a result: every token
// is the sequence's own draw, and a draft is kept only while it equals that draw. Used by the step
// thread alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace freshet::speculative {

// A sequence that waits for its next decode step.
struct DraftRequest {
  uint64_t sequence = 0;            // the same number for all of its steps
  std::span<const int32_t> tokens;  // prompt and output, all known
  int32_t limit = 0;                // more drafts are never used
  std::vector<int32_t> draft;       // result: ids of the model's vocabulary; may stay empty
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual void propose(std::span<DraftRequest> requests) = 0;
};

}  // namespace freshet::speculative

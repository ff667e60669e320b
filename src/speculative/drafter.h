// Proposes tokens for sequences ahead of the model, which verifies them in its next step.
//
// The step loop asks for drafts before it schedules a step, for all sequences at once, so that a
// draft model can run them as one batch. A wrong proposal costs time, never a result: every token
// is the sequence's own draw, and a draft is kept only while it equals that draw. Other rules of
// acceptance are opt-in (acceptance.h); rejection sampling needs drafts that were drawn from the
// distributions that come with them, and with independent noise. After each step
// the drafter sees the rows that the target computed. All calls come from the step thread, in this
// order: propose(), a step of the target, observe(), forget() of the sequences that ended. A
// drafter that needs no states is not shown all steps in which nothing was drafted.
//
// A drafter is one source file, a declaration in registry.h and a line in registry.cc. It may rely
// on this: the tokens of a sequence only ever grow, and a sequence number is never used twice. A
// sequence that was preempted is observed again from its first token. A sequence may start with
// tokens that were never observed, because the target found them in its prefix cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "freshet/engine.h"
#include "sampling/logits.h"

namespace freshet::speculative {

// The states of the target that a drafter reads, beside the tokens.
struct StateNeeds {
  bool last = false;            // states after the final norm
  std::vector<int> boundaries;  // residual streams behind this many layers (0: the embeddings)

  bool any() const { return last || !boundaries.empty(); }
};

// Rows of a step of the target, of one sequence.
struct TargetRows {
  uint64_t sequence = 0;
  std::span<const int32_t> tokens;  // of the sequence, all known; more than first + count
  uint64_t owner = 0;               // as in DraftRequest
  int32_t first = 0;                // position of the first row
  int32_t count = 0;
  const float* last = nullptr;  // [count, hidden]; nullptr unless needed
  // [boundaries] of [count, hidden]; empty unless needed
  std::vector<const float*> boundaries;
};

// A sequence that waits for its next decode step.
struct DraftRequest {
  uint64_t sequence = 0;            // the same number for all of its steps
  std::span<const int32_t> tokens;  // prompt and output, all known
  int32_t limit = 0;                // more drafts are never used
  // Of combined drafters: the limit of those that look drafts up, which cost nothing.
  int32_t lookup_limit = 0;
  // Result: the draft was looked up, and `limit` is at least lookup_limit.
  bool looked_up = false;
  // How the sequence draws its tokens, for drafters that draw with the same noise.
  const SamplingParams* params = nullptr;
  uint64_t seed = 0;
  uint32_t sample = 0;  // which of the request's n samples
  // Whose text it is: what one owner wrote is never proposed to another.
  uint64_t owner = 0;
  // Drafts that are drawn must be drawn with noise of their own (acceptance.h, draft_bits), from
  // distributions that are put into `drawn_from`.
  bool wants_distributions = false;
  std::vector<int32_t> draft;  // result: ids of the model's vocabulary; may stay empty
  // Result: what each draft was drawn from, in order of id. No entry, or an empty one: the draft is
  // a function of the tokens before it.
  std::vector<std::vector<Candidate>> drawn_from;
  bool tree = false;  // whether other paths than one are wanted; never with `wants_distributions`
  // Result, if `tree`: the other paths of a draft tree, each from the first draft to a leaf. Where
  // paths begin alike, they share nodes; each path costs a row more than it has drafts.
  std::vector<std::vector<int32_t>> branches;

  int32_t depth() const;                 // of the longest path
  int32_t rows() const;                  // that the step has more than without drafts
  void shorten(int32_t most_of_a_path);  // to 0: no drafts are left
};

class StepCosts;

class Drafter {
 public:
  virtual ~Drafter() = default;

  // What the target's steps take, for drafters that choose by it; outlives the drafter's calls.
  virtual void use_costs(const StepCosts& /*costs*/) {}

  virtual void propose(std::span<DraftRequest> requests) = 0;

  virtual StateNeeds needs() const { return {}; }
  // The rows of a step, but those of rejected drafts. Pointers are valid during the call.
  virtual void observe(std::span<const TargetRows> /*rows*/) {}
  virtual void forget(uint64_t /*sequence*/) {}
};

}  // namespace freshet::speculative

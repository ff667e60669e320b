// Decides, step by step, how many drafts each sequence is asked for.
//
// The step loop calls choose() before it asks the drafter, drafted() with the proposals, and
// stepped() once their step is done. Lengths may depend on time and load: they change what a step
// costs, never a token. All calls come from the step thread.
#pragma once

#include <cstdint>
#include <span>

#include "freshet/engine.h"
#include "speculative/drafter.h"

namespace freshet::speculative {

// What a step ran. A row is a token that the model computes.
struct StepShape {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t context = 0;      // of all sequences together
  int64_t row_context = 0;  // the sum over rows of the context that each reads

  void add(int64_t tokens, int64_t context_of_sequence) {
    ++sequences;
    context += context_of_sequence;
    add_rows(tokens, context_of_sequence);
  }
  // More rows of a sequence that was added: a branch of a draft tree.
  void add_rows(int64_t tokens, int64_t context_of_sequence) {
    rows += tokens;
    row_context += tokens * context_of_sequence;
  }
};

struct StepDone {
  StepShape shape;
  int64_t drafted = 0;        // of its rows, those that it has because of drafts
  int64_t prompt_tokens = 0;  // of its rows, those of prompts
  int64_t tokens = 0;         // that it gave
  double seconds = 0.0;       // without the drafter's time
  // What the loop took beside the step and the drafter's proposals because there are drafts: it
  // shows states and chooses lengths.
  double more_seconds = 0.0;
};

class DraftLengths {
 public:
  virtual ~DraftLengths() = default;

  // Lowers `limit` of each request, to 0 for sequences that draft nothing in this step.
  virtual void choose(std::span<DraftRequest> requests) = 0;
  // The proposals of the requests whose limit is above 0, which took the drafter `seconds`. May
  // shorten them.
  virtual void drafted(std::span<DraftRequest> requests, double seconds) = 0;
  virtual void stepped(const StepDone& step) = 0;
  virtual void forget(uint64_t /*sequence*/) {}
  // Whether no drafts will be wanted in the next step either, so that it may start early.
  virtual bool resting() const { return false; }
  virtual void publish(EngineStats::Speculation& /*stats*/) const {}
};

}  // namespace freshet::speculative

// Beam search over token ids: which beams live on, which are finished. Knows logits, not tensors or
// caches: the caller runs the model and forks sequences as advance() says.
//
// The rules are those of Hugging Face's generate(): of all continuations of the live beams the best
// 2 * width are looked at; one that ends the text is finished if it is among the best `width`;
// others live on until `width` do. A finished text scores sum(logprobs) / length^length_penalty,
// the end token counted; the best `width` are kept. It is over when `width` are finished and no
// live beam can beat the worst (or at once with early_stopping). Equal scores: the earlier beam,
// the lower id. Used by one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/logits.h"

namespace freshet {

struct BeamOptions {
  int width = 4;
  float length_penalty = 1.0f;
  bool early_stopping = false;
  std::vector<int32_t> stop_ids;
};

struct BeamHypothesis {
  std::vector<int32_t> ids;  // of the output; a stop token that ended it is included
  double score = 0.0;
  bool stopped = false;  // ended by a stop token, not by the limit
};

class BeamSearch {
 public:
  BeamSearch(BeamOptions options, int64_t vocab);

  // The continuation of a beam: beam `parent` of the step before, and `id` after it.
  struct Step {
    int parent = 0;
    int32_t id = 0;
  };

  int live() const { return static_cast<int>(beams_.size()); }  // rows that advance() wants
  // logits: [live(), vocab], raw. Returns the beams that live on (fewer than `width` only where
  // there are not that many continuations). Empty: nothing can follow.
  std::span<const Step> advance(std::span<const float> logits);
  bool done() const { return done_; }
  // Ends the search: live beams count as finished as they are. Best first, at most `width`.
  std::vector<BeamHypothesis> finish();

 private:
  struct Beam {
    std::vector<int32_t> ids;
    double logprob = 0.0;
  };
  struct Continuation {
    double logprob = 0.0;
    int parent = 0;
    int32_t id = 0;
  };

  std::vector<Continuation> best_continuations(std::span<const float> logits);
  double score(double logprob, size_t length) const;
  void add_finished(std::vector<int32_t> ids, double logprob, bool stopped);
  bool is_stop(int32_t id) const;

  BeamOptions options_;
  int64_t vocab_;
  std::vector<Beam> beams_;
  std::vector<BeamHypothesis> finished_;  // best first
  std::vector<Step> steps_;
  LogitScratch scratch_;
  bool done_ = false;
};

}  // namespace freshet

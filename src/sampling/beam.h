// Beam search over token ids: decides which beams go on and which are finished. It reads logits
// only; the caller runs the model and forks sequences as advance() says.
//
// The rules are those of Hugging Face's generate(). The best 2 * width continuations of all live
// beams are considered. A continuation that ends the text is finished if it is among the best
// `width`; of the others the best `width` go on. A finished text scores sum(logprobs) /
// length^length_penalty, the end token included; the best `width` are kept. The search is done when
// `width` texts are finished and no live beam can beat the worst of them (or at once with
// early_stopping). Ties go to the earlier beam, then to the lower id. Used by one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampling/logits.h"
#include "sampling/token_bans.h"

namespace freshet {

struct BeamOptions {
  int width = 4;
  float length_penalty = 1.0f;
  bool early_stopping = false;
  std::vector<int32_t> stop_ids;
  TokenBans bans;            // continuations that do not count, whatever their score
  bool renormalize = false;  // the others share all of the probability
};

struct BeamHypothesis {
  std::vector<int32_t> ids;  // of the output; a stop token that ended it is included
  double score = 0.0;
  bool stopped = false;  // ended by a stop token, not by the limit
};

class BeamSearch {
 public:
  BeamSearch(BeamOptions options, int64_t vocab);

  // A continuation: beam `parent` of the previous step, followed by `id`.
  struct Step {
    int parent = 0;
    int32_t id = 0;
  };

  int live() const { return static_cast<int>(beams_.size()); }  // rows that advance() needs
  // logits: [live(), vocab], raw. Returns the beams that go on: fewer than `width` only if there
  // are not that many continuations. Empty: no token is possible. If that is because of the bans,
  // the texts so far are finished, otherwise they are dropped.
  std::span<const Step> advance(std::span<const float> logits);
  bool done() const { return done_; }
  // Ends the search; live beams count as finished. Best first, at most `width`.
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
  std::vector<int32_t> banned_;  // of the current beam
  std::vector<float> row_;       // its logits without them
  bool done_ = false;
};

}  // namespace freshet

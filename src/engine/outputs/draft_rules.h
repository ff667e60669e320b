// Decides which drafts of a step a sample keeps, by the rule that holds for its request
// (speculative/acceptance.h).
//
// The sample walks the rows of a step (sampled.cc). For each row with a draft it asks judge(),
// which keeps the draft, gives another token, or leaves the token to the row's own draw. Block
// verification (BlockWalk) and synthetic acceptance decide before the walk how many drafts are
// kept. DraftRules are immutable; all functions are called from the thread pool.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/outputs/request_output.h"
#include "speculative/acceptance.h"

namespace freshet::engine {

// A draft, and the row that gives the token of its position.
struct DraftRow {
  int64_t first = 0;  // position of the step's first draft
  int32_t index = 0;  // of the draft in the step
  int32_t draft = 0;
  std::span<const Candidate> drawn_from;  // empty: the draft is a function of the tokens before it
  std::span<const float> logits;          // empty if a device sampled the row
};

struct Ruling {
  enum class Token : uint8_t {
    kDraft,
    kOther,    // `other`
    kOwn,      // the row's own; the draft is kept if it is equal
    kOwnLast,  // the row's own, and no draft is kept from here on
  };
  Token token = Token::kOwn;
  int32_t other = -1;
};

// What is decided before the rows are walked.
struct BlockRuling {
  int32_t kept = 0;      // drafts
  double product = 1.0;  // block_product() of the kept ones
};

class DraftRules {
 public:
  // `greedy`: the request draws no random numbers. Every lawful rule is match then. `server` must
  // outlive the rules.
  DraftRules(const speculative::AcceptanceOptions& server, const SamplingParams& params,
             bool greedy);

  // Whether drafts must come with the distributions that they were drawn from. Such a draft must
  // not be dropped because of what it is: that would change the distribution of the output.
  bool wants_distributions() const;
  // Whether a draft may be one of several for its position.
  bool allows_trees() const { return method_ == Acceptance::kMatch; }
  // Whether a row with a draft needs logits. `drawn`: the draft comes with a distribution.
  bool reads_logits(bool drawn) const;
  bool walks_block() const { return method_ == Acceptance::kBlock; }
  bool counts_rejections() const;
  // The probability that the row's draft is rejected. REQUIRES: counts_rejections().
  double rejection_odds(const DraftRow& row, Sampler& sampler, TokenMask mask,
                        VerifyScratch& scratch) const;

  // Synthetic acceptance: how many of the drafts are kept.
  BlockRuling decide_ahead(int64_t first, int32_t drafts, const Sampler& sampler) const;
  // `block`: what BlockWalk or decide_ahead() gave.
  Ruling judge(const DraftRow& row, const BlockRuling& block, Sampler& sampler, TokenMask mask,
               VerifyScratch& scratch) const;

 private:
  const speculative::AcceptanceOptions* server_;
  Acceptance method_;
};

// Block verification: walks the path of the drafts, row by row.
class BlockWalk {
 public:
  // `sampler` has accepted the drafts before the row. `last`: no draft follows. False: nothing
  // behind the row can be kept.
  bool step(const DraftRow& row, bool last, Sampler& sampler, TokenMask mask,
            VerifyScratch& scratch);
  BlockRuling ruling() const { return best_; }

 private:
  void consider(const DraftRow& row, int32_t kept, double residual, const Sampler& sampler);

  double product_ = 1.0;  // of the drafts before the row
  BlockRuling best_;
};

// Drafts that were rejected in a step, and the number expected.
struct Rejections {
  int64_t seen = 0;
  double expected = 0.0;
  double variance = 0.0;

  void add(double odds, bool kept);
};

}  // namespace freshet::engine

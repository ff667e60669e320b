// Chooses how many tokens are drafted, by what they cost and what they give.
//
// A step that verifies drafts takes longer, drafting takes time too, and a draft counts only if all
// before it are accepted. The controller knows the time of a step by its rows (step_costs.h), of a
// round of drafting (drafting_costs.h) and the probability that each draft survives
// (acceptance_rates.h). It takes the drafts of all sequences in order of survival, and as many of
// them as give the most tokens per second. If no drafts are better than any, it is off, and spends
// a small share of the time on single drafts to notice when they would pay again. Of a drafter that
// costs nothing it sees the proposals in any case, and compares them with what comes. Such drafts
// are copied from a text: while a copy goes on they are accepted far more often than at its
// beginning, so their rates are kept by how many tokens in a row were right before.
//
// Now and then a step runs plain for comparison; on a device that runs ahead, a burst of them does
// (plain_steps.h). The gain that was measured corrects what is expected of the next steps. Used by
// one thread; it reads no clock.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "speculative/acceptance_rates.h"
#include "speculative/draft_lengths.h"
#include "speculative/drafting_costs.h"
#include "speculative/plain_steps.h"
#include "speculative/step_costs.h"

namespace freshet::speculative {

struct LengthOptions {
  int max_drafts = 15;  // of a sequence in a step
  bool fixed = false;   // always max_drafts: the gain is measured and nothing else
  // Some drafts may be looked up (DraftRequest::looked_up) beside those of a model. They are asked
  // for in every step, and kept as far as they pay; what follows is about those of the model.
  bool lookups = false;
  int64_t max_rows = 0;  // of decoding sequences in a step; 0: no limit
  // Plain steps run ahead where nothing is drafted, and are faster than single ones (PlainSteps).
  bool runs_ahead = false;
};

class LengthController final : public DraftLengths {
 public:
  LengthController(StepCosts costs, const LengthOptions& options);

  void choose(std::span<DraftRequest> requests) override;
  void drafted(std::span<DraftRequest> requests, double seconds) override;
  void stepped(const StepDone& step) override;
  void forget(uint64_t sequence) override { sequences_.erase(sequence); }
  bool resting() const override;
  void publish(EngineStats::Speculation& stats) const override;
  const StepCosts& costs() const { return costs_; }

 private:
  struct Sequence {
    AcceptanceRates::Own own, copy_own;
    bool copied = false;  // the last paths were: looked up, or by a drafter that costs nothing
    int run = 0;          // tokens of copied drafts in a row that were right
    size_t run_then = 0;  // run_class() when the last paths were proposed
    // The last paths that were proposed, until it is known which tokens are right.
    std::vector<std::vector<int32_t>> paths;
    size_t draft_at = 0;     // the length of the sequence then
    int32_t drafter_at = 0;  // what the drafter has read
    bool probe = false;
  };
  struct Plan {
    std::vector<int> lengths;    // [requests]
    double tokens = 0.0;         // expected
    double seconds = 0.0;        // of the step and the drafting
    double plain_seconds = 0.0;  // of the step without drafts, which gives [requests] tokens
    double gain() const;
    bool drafts() const { return tokens > static_cast<double>(lengths.size()); }
  };
  struct Slot {
    double survival;
    int request;
    int depth;
  };
  // Sums over recent or all steps.
  struct Gain {
    double plain = 0.0, taken = 0.0;
    double ratio() const { return taken > 0.0 ? plain / taken : 0.0; }
    void add(double plain_seconds, double seconds, double memory) {
      plain = plain * memory + plain_seconds;
      taken = taken * memory + seconds;
    }
  };

  // Runs are of three classes: none, short and long.
  static constexpr size_t kRunClasses = 3;
  static size_t run_class(int run);

  void learn(const DraftRequest& r);
  void add_rates(Sequence& s, int right, int drafted);
  void survival_of(const DraftRequest& r, std::span<double> out) const;
  void trim_lookups(std::span<DraftRequest> requests, std::vector<int>& lengths);
  bool drafts_free(size_t sequences) const;
  StepShape plain_shape(std::span<const DraftRequest> requests) const;
  int64_t missed_tokens(const DraftRequest& r) const;
  // The best lengths of at most `most`, if their gain is above `least`; with `drafting`, the
  // drafter's time counts.
  Plan best_plan(std::span<const DraftRequest> requests, const std::vector<int>& most, double least,
                 bool drafting) const;
  Plan plan_of(std::span<const DraftRequest> requests, const std::vector<int>& lengths,
               double draft_seconds) const;
  void choose_paid(std::span<DraftRequest> requests, std::vector<int>& lengths);
  void probe(std::span<const DraftRequest> requests, std::vector<int>& lengths);
  void keep_pilots(std::span<const DraftRequest> requests, std::vector<int>& lengths) const;
  bool control_due(double gain);
  bool in_control();
  double correction() const;  // of an expected gain

  StepCosts costs_;
  DraftingCosts drafting_;
  AcceptanceRates rates_;
  std::array<AcceptanceRates, kRunClasses> copy_rates_;
  bool free_ = false;  // the drafter costs nothing
  const LengthOptions options_;
  std::unordered_map<uint64_t, Sequence> sequences_;

  // Of the step in preparation.
  Plan plan_;
  bool planned_ = false;
  double draft_seconds_ = 0.0;

  double tree_rows_ = 1.0;  // of a tree, for each of its levels; of recent trees

  bool on_ = true;
  bool probing_ = false;
  double plain_token_ = 0.0;  // seconds of a token in the last plain step
  double budget_ = 0.0;       // seconds that single drafts may take while it is off
  int64_t since_plain_ = 0;   // steps with drafts
  int64_t prompt_tokens_ = 0;
  int64_t controls_ = 0;
  int control_left_ = 0;       // plain steps of a control that are still to come
  bool after_drafts_ = false;  // the last step had drafts
  PlainSteps plain_steps_;
  double measured_steps_ = 0.0;  // recent ones with drafts
  Gain measured_, expected_;     // of recent steps with drafts
  Gain all_measured_, all_expected_;
};

}  // namespace freshet::speculative

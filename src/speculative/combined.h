// Several drafters for the same sequences: any number that look drafts up (n-grams, suffixes), and
// at most one that runs a model. Each sequence gets the draft with the largest expected gain.
//
// The gain of a draft is the number of its tokens that are expected to be accepted, less the tokens
// that plain steps would give in the time that verifying and drafting it take. Acceptance is
// learned for each drafter: proposals that were looked up are compared with the tokens that came
// whether they were used or not; those of the model, which is asked only where its drafts are used,
// after they were. The choice never depends on the model's own draft, so rejection sampling stays
// right.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "speculative/acceptance_rates.h"
#include "speculative/drafter.h"
#include "speculative/drafting_costs.h"
#include "speculative/step_costs.h"

namespace freshet::speculative {

class CombinedDrafter final : public Drafter {
 public:
  // model: nullptr if all drafters look drafts up.
  CombinedDrafter(std::vector<std::unique_ptr<Drafter>> lookups, std::unique_ptr<Drafter> model);

  void use_costs(const StepCosts& costs) override { costs_ = &costs; }
  void propose(std::span<DraftRequest> requests) override;
  StateNeeds needs() const override { return model_ ? model_->needs() : StateNeeds(); }
  void observe(std::span<const TargetRows> rows) override;
  void forget(uint64_t sequence) override;

 private:
  // What a drafter proposed for a sequence, until the tokens that came tell how good it was.
  struct Proposal {
    AcceptanceRates::Own own;
    std::vector<int32_t> draft;
    size_t at = 0;  // the length of the sequence then
  };
  struct Sequence {
    std::vector<Proposal> proposals;  // of the lookups, then of the model
    size_t read_by_model = 0;
  };

  Sequence& sequence_of(uint64_t id);
  void learn(Sequence& s, std::span<const int32_t> tokens);
  void look_up(std::span<DraftRequest> requests);
  void ask_model(std::span<DraftRequest> requests);
  // Expected tokens of a draft of `length` tokens, less what its time would give.
  double gain(size_t drafter, const Sequence& s, const DraftRequest& r, int length) const;
  void measure_plain(std::span<const DraftRequest> requests);

  std::vector<std::unique_ptr<Drafter>> lookups_;
  std::unique_ptr<Drafter> model_;
  std::vector<AcceptanceRates> rates_;  // of the lookups, then of the model
  DraftingCosts drafting_{0.0};         // of the model
  const StepCosts* costs_ = nullptr;
  std::unordered_map<uint64_t, Sequence> sequences_;

  // Of the step in preparation.
  StepShape plain_;
  double plain_seconds_ = 0.0;
  std::vector<std::vector<DraftRequest>> found_;  // [lookups]
  std::vector<DraftRequest> asked_;               // of the model
  std::vector<size_t> owner_;                     // [asked_] index of the request
};

}  // namespace freshet::speculative

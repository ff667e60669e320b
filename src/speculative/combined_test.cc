// Which of several drafters gets a sequence: the one whose drafts are accepted more often, at its
// price; and that drafts which were looked up are learned from although they were not used.
#include "speculative/combined.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "base/philox.h"
#include "speculative/length_controller.h"

namespace freshet::speculative {
namespace {

// Tokens are 0; a draft is right where it is 0.
class FakeDrafter final : public Drafter {
 public:
  FakeDrafter(double alpha, int most, uint64_t seed) : alpha_(alpha), most_(most), seed_(seed) {}
  void propose(std::span<DraftRequest> requests) override {
    for (DraftRequest& r : requests) {
      ++asked;
      const int size = std::min(r.limit, most_);
      for (int d = 0; d < size; ++d)
        r.draft.push_back(philox_uniform(seed_, draws_++, 7) < alpha_ ? 0 : 1);
    }
  }
  int asked = 0;

 private:
  double alpha_;
  int most_;
  uint64_t seed_, draws_ = 0;
};

StepCosts flat_costs() {
  return StepCosts({{1, 1.0}, {4, 1.05}, {16, 1.2}, {64, 2.0}});
}

struct Outcome {
  int asked = 0;      // steps in which the model drafted
  int looked_up = 0;  // steps with a draft that was looked up
  int64_t tokens = 0;
};

// `steps` steps of a sequence; lookups with these acceptances, and a model.
Outcome run_steps(std::vector<double> lookups, double model, int steps, LengthController* lengths) {
  std::vector<std::unique_ptr<Drafter>> found;
  for (size_t i = 0; i < lookups.size(); ++i)
    found.push_back(std::make_unique<FakeDrafter>(lookups[i], 8, i + 1));
  auto own = std::make_unique<FakeDrafter>(model, 8, 99);
  FakeDrafter* const asked = own.get();
  CombinedDrafter drafter(std::move(found), std::move(own));
  const StepCosts costs = flat_costs();
  drafter.use_costs(costs);
  Outcome outcome;
  std::vector<int32_t> text(50, 0);
  for (int i = 0; i < steps; ++i) {
    std::vector<DraftRequest> r = {{.sequence = 1, .tokens = text, .limit = 4, .lookup_limit = 4}};
    if (lengths != nullptr) lengths->choose(r);
    drafter.propose(r);
    if (lengths != nullptr) lengths->drafted(r, r[0].looked_up ? 1e-6 : 0.4 * r[0].depth());
    const auto right = std::ranges::find(r[0].draft, 1) - r[0].draft.begin();
    outcome.looked_up += r[0].looked_up ? 1 : 0;
    outcome.tokens += right + 1;
    text.insert(text.end(), static_cast<size_t>(right) + 1, 0);
    if (lengths == nullptr) continue;
    StepDone done{.drafted = std::ssize(r[0].draft), .tokens = right + 1};
    done.shape.add(1 + done.drafted, std::ssize(text));
    done.seconds = flat_costs().seconds(done.shape);
    lengths->stepped(done);
  }
  outcome.asked = asked->asked;
  return outcome;
}

TEST(CombinedDrafter, GivesEachStepToTheBetterDrafter) {
  const Outcome model_better = run_steps({0.2}, 0.8, 400, nullptr);
  EXPECT_GT(model_better.asked, 360);
  const Outcome lookup_better = run_steps({0.9}, 0.3, 400, nullptr);
  EXPECT_LT(lookup_better.asked, 40);
  EXPECT_GT(lookup_better.looked_up, 360);
  // The second lookup is the better one: its proposals are learned from while they are not used.
  const Outcome second = run_steps({0.1, 0.9}, 0.3, 400, nullptr);
  EXPECT_GT(second.tokens, 0.95 * static_cast<double>(lookup_better.tokens));
}

TEST(CombinedDrafter, IsOneDrafterWithoutAModel) {
  std::vector<std::unique_ptr<Drafter>> found;
  found.push_back(std::make_unique<FakeDrafter>(1.0, 3, 1));
  CombinedDrafter drafter(std::move(found), nullptr);
  std::vector<int32_t> text(9, 0);
  std::vector<DraftRequest> r = {{.sequence = 1, .tokens = text, .limit = 4}};
  drafter.propose(r);
  EXPECT_EQ(r[0].draft.size(), 3u);
  EXPECT_FALSE(r[0].looked_up);
}

// Where the model's drafts do not pay, those that cost nothing still come.
TEST(LengthController, KeepsLookupsWhileTheModelIsOff) {
  LengthController lengths(flat_costs(), {.max_drafts = 8, .lookups = true});
  const Outcome outcome = run_steps({0.9}, 0.02, 600, &lengths);
  EXPECT_GT(outcome.looked_up, 500);
  EXPECT_LT(outcome.asked, 60);
  EXPECT_GT(outcome.tokens, 3 * 600);
  // And drafts that are looked up and wrong are not verified for long.
  LengthController wrong(flat_costs(), {.max_drafts = 8, .lookups = true});
  const Outcome none = run_steps({0.01}, 0.02, 600, &wrong);
  EXPECT_LT(none.asked, 100);
  EXPECT_FALSE(wrong.resting());
}

}  // namespace
}  // namespace freshet::speculative

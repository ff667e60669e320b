// Draft trees change the number of steps and nothing else: whatever branches a drafter proposes,
// requests have the tokens, log-probabilities and ends that they have without.
#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "engine/oracle_drafter_test.h"
#include "engine/step_loop_rig_test.h"
#include "engine/tree_drafter_test.h"

namespace freshet::engine {
namespace {

constexpr int32_t kEos = 11;

class LawOfTrees : public ::testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Windows, LawOfTrees,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{0, 24},
                                           std::vector<int>{17}));

TEST_P(LawOfTrees, TreesChangeNothing) {
  RigOptions narrow{.max_model_len = 160, .tokens = 64};
  for (const int window : GetParam()) {
    narrow.blocks.push_back(kv_cache::BlockCache::most_blocks(window, 160, 64) + 3);
  }
  for (RigOptions setup :
       {RigOptions{}, RigOptions{.share = false}, RigOptions{.chunk = 16},
        RigOptions{.tokens = 40, .rows = 25}, narrow, RigOptions{.draws = true}}) {
    setup.windows = GetParam();
    setup.eos = {kEos};
    RigOptions plain{.share = false};
    plain.windows = setup.windows;
    plain.eos = setup.eos;
    Rig alone(plain);
    OracleDrafter oracle(5, 0.4);
    std::vector<Outcome> want;
    for (int i = 0; i < kRequests; ++i) {
      const Request r = drafted_request(i, !setup.draws);
      want.push_back(alone.run(r));
      oracle.learn(r, want.back());
    }
    TreeDrafter drafter(oracle, 3);
    setup.drafter = &drafter;
    setup.tree_max_batch = 1000;
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (int i = 0; i < kRequests; ++i) sent.push_back(&rig.send(drafted_request(i, !setup.draws)));
    for (size_t i = 0; i < sent.size(); ++i) {
      const Outcome& got = Rig::wait(*sent[i]);
      expect_same(want[i], got, static_cast<int>(i));
      EXPECT_EQ(got.reason, want[i].reason);
      EXPECT_EQ(got.usage.completion_tokens, want[i].usage.completion_tokens);
    }
    const EngineStats stats = rig.loop().stats();
    if (!setup.blocks.empty()) {
      EXPECT_GT(stats.preemptions, 0);
    }
    EXPECT_EQ(stats.kv_cache_usage, 0.0);
    rig.stop();
    EXPECT_GT(drafter.trees(), kRequests * 2);
    EXPECT_GT(stats.speculation.accepted_tokens, kRequests * 5);
  }
}

// Branches that are right save the steps that a right chain saves. The drafter sees the states of
// the path that was accepted, which are those of a run without drafts.
TEST(StepLoop, ARightBranchSavesSteps) {
  class OneRight final : public speculative::Drafter {
   public:
    OneRight(OracleDrafter& oracle, int place) : oracle_(oracle), place_(place) {}
    void propose(std::span<speculative::DraftRequest> requests) override {
      oracle_.propose(requests);
      for (speculative::DraftRequest& r : requests) {
        if (r.draft.empty()) continue;
        EXPECT_TRUE(r.tree);
        for (int wrong = 1; wrong <= 2; ++wrong) {
          std::vector<int32_t> path = r.draft;
          int32_t& id = path[static_cast<size_t>(wrong - 1) % path.size()];
          id = (id + wrong) % FakeModel::kVocab;
          r.branches.push_back(std::move(path));
        }
        if (place_ > 0) std::swap(r.draft, r.branches[static_cast<size_t>(place_ - 1)]);
      }
    }

   private:
    OracleDrafter& oracle_;
    int place_;
  };
  for (const bool draws : {false, true}) {
    for (const int which : {0, 1, 2}) {  // greedy, sampled, with penalties
      Request r = request_of(which);
      r.params.logprobs = -1;
      r.params.max_tokens = 1 + 4 * 5;
      Rig plain({});
      const Outcome want = plain.run(r);
      OracleDrafter oracle(4, 0.0);
      oracle.learn(r, want);
      for (const int place : {0, 1, 2}) {
        OneRight drafter(oracle, place);
        RigOptions setup{.draws = draws};
        setup.drafter = &drafter;
        setup.tree_max_batch = 1;
        Rig rig(setup);
        EXPECT_EQ(rig.run(r).ids, want.ids);
        const EngineStats stats = rig.loop().stats();
        EXPECT_EQ(stats.steps, 1 + 4);
        EXPECT_EQ(stats.generated_tokens, 1 + 4 * 5);
        EXPECT_EQ(stats.speculation.accepted_tokens, 4 * 4);
        EXPECT_GT(stats.speculation.draft_tokens, 4 * 4 + 4);
      }
    }
  }
}

TEST(StepLoop, TheDrafterSeesTheAcceptedPath) {
  Request r = request_of(1);
  r.params.max_tokens = 60;
  OracleDrafter nothing(1, 0.0), oracle(5, 0.3);
  const auto states_with = [&](OracleDrafter& from) {
    TreeDrafter drafter(from, 3);
    RigOptions setup;
    setup.drafter = &drafter;
    setup.tree_max_batch = 1;
    Rig rig(setup);
    const Outcome outcome = rig.run(r);
    rig.stop();
    oracle.learn(r, outcome);
    return drafter.take_ended();
  };
  const auto want = states_with(nothing);
  const auto got = states_with(oracle);
  ASSERT_EQ(want.size(), 1u);
  ASSERT_EQ(got.size(), 1u);
  // The last step of the two need not be the same one.
  const size_t both = std::min(want[0].size(), got[0].size());
  EXPECT_GT(both, r.prompt.size() + 40);
  EXPECT_TRUE(std::equal(want[0].begin(), want[0].begin() + static_cast<std::ptrdiff_t>(both),
                         got[0].begin()));
}

TEST(StepLoop, ManySequencesGetChains) {
  class AsksForTrees final : public speculative::Drafter {
   public:
    void propose(std::span<speculative::DraftRequest> requests) override {
      for (speculative::DraftRequest& r : requests) {
        EXPECT_EQ(r.tree, requests.size() <= 2);
        most_ = std::max(most_, requests.size());
        r.draft = {1};
        r.branches = {{2}};
      }
    }
    size_t most_ = 0;
  };
  AsksForTrees drafter;
  RigOptions setup;
  setup.drafter = &drafter;
  setup.tree_max_batch = 2;
  Rig rig(setup);
  for (int i = 0; i < 5; ++i) rig.send(drafted_request(i, true));
  Rig plain({});
  const Outcome want = plain.run(drafted_request(6, true));
  expect_same(want, rig.run(drafted_request(6, true)), 6);
  rig.stop();
  EXPECT_GT(drafter.most_, 2u);
}

}  // namespace
}  // namespace freshet::engine

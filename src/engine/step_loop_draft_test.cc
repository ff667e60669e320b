// Drafts change the number of steps and nothing else: whatever a drafter proposes, requests have
// the tokens, log-probabilities and ends that they have without.
#include <algorithm>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "base/philox.h"
#include "engine/oracle_drafter_test.h"
#include "engine/step_loop_rig_test.h"
#include "engine/tree_drafter_test.h"

namespace freshet::engine {
namespace {

constexpr int32_t kEos = 11;

class LawOfDrafts : public ::testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Windows, LawOfDrafts,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{0, 24},
                                           std::vector<int>{17}));

TEST_P(LawOfDrafts, DraftsChangeNothing) {
  RigOptions narrow{.max_model_len = 160, .tokens = 64};
  for (const int window : GetParam()) {
    narrow.blocks.push_back(kv_cache::BlockCache::most_blocks(window, 160, 64) + 3);
  }
  for (RigOptions setup : {RigOptions{}, RigOptions{.share = false}, RigOptions{.chunk = 16},
                           RigOptions{.tokens = 7, .rows = 5}, narrow, RigOptions{.draws = true}}) {
    setup.windows = GetParam();
    setup.eos = {kEos};
    RigOptions plain{.share = false};
    plain.windows = setup.windows;
    plain.eos = setup.eos;
    Rig alone(plain);
    OracleDrafter drafter(5, 0.4);
    std::vector<Outcome> want;
    for (int i = 0; i < kRequests; ++i) {
      const Request r = drafted_request(i, !setup.draws);
      want.push_back(alone.run(r));
      drafter.learn(r, want.back());
    }
    setup.drafter = &drafter;
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
    // With a window alone, sequences hold few blocks: whether they run out depends on the timing.
    if (!setup.blocks.empty() && std::ranges::count(setup.windows, 0) > 0) {
      EXPECT_GT(stats.preemptions, 0);
    }
    EXPECT_EQ(stats.kv_cache_usage, 0.0);
    rig.stop();
    EXPECT_GT(drafter.proposed(), kRequests * 5);
  }
}

// Proposes anything: random ids, the same id again and again, ends of texts, ids out of range, more
// than it was asked for.
class HostileDrafter final : public speculative::Drafter {
 public:
  void propose(std::span<speculative::DraftRequest> requests) override {
    for (speculative::DraftRequest& r : requests) {
      const auto kind = philox_uniform(r.sequence, r.tokens.size(), 1) * 5;
      for (int i = 0; i < r.limit + 3; ++i) {
        const auto random = static_cast<uint32_t>(i + 2);
        const auto id = static_cast<int32_t>(philox_uniform(r.sequence, r.tokens.size(), random) *
                                             FakeModel::kVocab);
        r.draft.push_back(kind < 1   ? id
                          : kind < 2 ? kEos
                          : kind < 3 ? -id
                          : kind < 4 ? FakeModel::kVocab + id * 100000
                                     : r.tokens.back());
      }
    }
  }
};

TEST(StepLoop, HostileDraftsChangeNothing) {
  for (const bool draws : {false, true}) {
    RigOptions plain;
    plain.eos = {kEos};
    Rig alone(plain);
    HostileDrafter drafter;
    RigOptions setup{.draws = draws};
    setup.eos = {kEos};
    setup.drafter = &drafter;
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (int i = 0; i < kRequests; ++i) sent.push_back(&rig.send(drafted_request(i, !draws)));
    for (int i = 0; i < kRequests; ++i) {
      expect_same(alone.run(drafted_request(i, !draws)), Rig::wait(*sent[static_cast<size_t>(i)]),
                  i);
    }
  }
}

// Changes lengths at random, as a controller does that follows the time, and rests now and then.
class RandomLengths final : public speculative::DraftLengths {
 public:
  void choose(std::span<speculative::DraftRequest> requests) override {
    for (speculative::DraftRequest& r : requests)
      r.limit = resting() ? 0 : std::min<int32_t>(r.limit, static_cast<int32_t>(random(6)) - 1);
  }
  void drafted(std::span<speculative::DraftRequest> requests, double /*seconds*/) override {
    for (speculative::DraftRequest& r : requests) {
      if (r.limit <= 0) {
        EXPECT_TRUE(r.draft.empty());
        r.limit = 0;
      }
      if (!r.draft.empty() && random(4) == 0) r.draft.pop_back();
    }
  }
  void stepped(const speculative::StepDone& step) override {
    EXPECT_GT(step.shape.sequences, 0);
    EXPECT_LE(step.drafted + step.prompt_tokens, step.shape.rows);
    EXPECT_GE(step.seconds, 0.0);
    drafted_ += step.drafted;
    ++stepped_;
  }
  void forget(uint64_t /*sequence*/) override { ++forgotten_; }
  bool resting() const override { return stepped_ % 8 >= 5; }

  int64_t drafts() const { return drafted_; }
  uint64_t steps() const { return stepped_; }
  int forgotten() const { return forgotten_; }

 private:
  uint64_t random(uint64_t below) { return philox_bits(8, draws_++, 0) % below; }

  uint64_t draws_ = 0, stepped_ = 0;
  int64_t drafted_ = 0;
  int forgotten_ = 0;
};

TEST(StepLoop, LengthsChangeNothing) {
  for (const bool draws : {false, true}) {
    OracleDrafter drafter(5, 0.4);
    Rig alone({.share = false});
    std::vector<Outcome> want;
    for (int i = 0; i < kRequests; ++i) {
      const Request r = drafted_request(i, !draws);
      want.push_back(alone.run(r));
      drafter.learn(r, want.back());
    }
    RandomLengths lengths;
    RigOptions setup{.tokens = 90, .draws = draws};
    setup.drafter = &drafter;
    setup.lengths = &lengths;
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (int i = 0; i < kRequests; ++i) sent.push_back(&rig.send(drafted_request(i, !draws)));
    for (size_t i = 0; i < sent.size(); ++i)
      expect_same(want[i], Rig::wait(*sent[i]), static_cast<int>(i));
    const EngineStats stats = rig.loop().stats();
    rig.stop();
    EXPECT_GT(lengths.drafts(), kRequests);
    EXPECT_EQ(lengths.drafts(), stats.speculation.draft_tokens);
    EXPECT_EQ(lengths.steps(), static_cast<uint64_t>(stats.steps));
    EXPECT_GE(lengths.forgotten(), kRequests);
    // A device's steps may run ahead while nothing is drafted.
    EXPECT_EQ(rig.model().ahead() > 0, draws);
  }
}

// A drafter that reads the target's states gets all of them, also of steps behind which another
// one runs already.
TEST(StepLoop, StatesOfStepsThatRunAheadAreSeen) {
  std::vector<Request> requests;
  for (int i = 0; i < 3; ++i) {
    requests.push_back(drafted_request(i, false));
    SamplingParams& p = requests.back().params;
    p.n = 1;
    p.max_tokens = 60;
    p.min_tokens = 0;
    p.stop_token_ids.clear();
  }
  const auto states_with = [&](bool draws, speculative::DraftLengths* lengths, int& ahead) {
    OracleDrafter nothing(1, 0.0);
    TreeDrafter drafter(nothing, 3);
    RigOptions setup{.draws = draws};
    setup.drafter = &drafter;
    setup.lengths = lengths;
    Rig rig(setup);
    for (const Request& r : requests) rig.run(r);
    rig.stop();
    ahead = rig.model().ahead();
    return drafter.take_ended();
  };
  RandomLengths lengths;
  int ahead = 0;
  const auto want = states_with(false, nullptr, ahead);
  EXPECT_EQ(ahead, 0);
  const auto got = states_with(true, &lengths, ahead);
  EXPECT_GT(ahead, 20);
  ASSERT_EQ(want.size(), requests.size());
  EXPECT_EQ(got, want);
}

// With every draft right a step makes one token more than it has drafts; with none right, one. Two
// devices: one leaves rows to the host, one samples the rows of drafts itself.
TEST(StepLoop, AcceptedDraftsSaveSteps) {
  for (const bool draws : {false, true}) {
    for (const int which : {0, 1, 2}) {  // greedy, sampled, with penalties
      Request r = request_of(which);
      r.params.logprobs = -1;
      r.params.max_tokens = 1 + 4 * 5;
      Rig plain({});
      const Outcome want = plain.run(r);
      for (const bool right : {true, false}) {
        OracleDrafter drafter(1, 1.0);
        OracleDrafter oracle(4, 0.0);
        (right ? oracle : drafter).learn(r, want);
        RigOptions setup{.draws = draws};
        setup.drafter = right ? &oracle : &drafter;
        Rig rig(setup);
        EXPECT_EQ(rig.run(r).ids, want.ids);
        const EngineStats stats = rig.loop().stats();
        EXPECT_EQ(stats.steps, right ? 1 + 4 : 1 + 4 * 5);
        EXPECT_EQ(stats.generated_tokens, 1 + 4 * 5);
        EXPECT_EQ(stats.step_tokens, std::ssize(r.prompt) + 1 + 4 * 5);
      }
    }
  }
}

TEST(StepLoop, BeamsAreRefusedWithADrafter) {
  OracleDrafter drafter(3, 0.2);
  RigOptions setup;
  setup.drafter = &drafter;
  Rig rig(setup);
  const auto error = rig.loop().check(request_of(4));
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->field, "beam_width");
  EXPECT_FALSE(rig.loop().check(request_of(3)).has_value());
}

// Whatever has no drafts of its own runs beside sequences that have some.
TEST(StepLoop, OutputsWithoutDraftsRunBesideThem) {
  Request drafted = request_of(1);
  Request scored = request_of(2);
  scored.params.prompt_logprobs = 2;
  Request embedded;
  embedded.prompt = prompt_of(70, 3);
  embedded.pooling = Pooling::kMean;
  std::vector<float> embedding;
  embedded.on_embedding = [&](const std::vector<float>& e) { embedding = e; };

  Rig plain({});
  const Outcome want_drafted = plain.run(drafted);
  const Outcome want_scored = plain.run(scored);
  plain.run(embedded);
  const std::vector<float> want_embedding = std::exchange(embedding, {});

  OracleDrafter drafter(3, 0.2);
  drafter.learn(drafted, want_drafted);
  drafter.learn(scored, want_scored);
  RigOptions setup{.tokens = 20};
  setup.drafter = &drafter;
  Rig rig(setup);
  Pending& a = rig.send(drafted);
  Pending& c = rig.send(scored);
  Pending& d = rig.send(embedded);
  expect_same(want_drafted, Rig::wait(a), 1);
  const Outcome& got = Rig::wait(c);
  expect_same(want_scored, got, 2);
  ASSERT_EQ(got.prompt_logprobs.size(), want_scored.prompt_logprobs.size());
  for (size_t i = 1; i < got.prompt_logprobs.size(); ++i) {
    ASSERT_EQ(got.prompt_logprobs[i].size(), 3u);
    EXPECT_EQ(got.prompt_logprobs[i][0].logprob, want_scored.prompt_logprobs[i][0].logprob);
  }
  Rig::wait(d);
  EXPECT_EQ(embedding, want_embedding);
}

}  // namespace
}  // namespace freshet::engine

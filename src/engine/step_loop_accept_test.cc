// Opt-in rules of acceptance, end to end: seeded requests stay reproducible, alone and in a batch,
// with penalties, grammars, log-probabilities and several samples.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/oracle_drafter_test.h"
#include "engine/step_loop_rig_test.h"
#include "grammar/grammar.h"
#include "speculative/draft_sampler.h"

namespace freshet::engine {
namespace {

constexpr int32_t kEos = 11;
constexpr int kVocab = FakeModel::kVocab;

// Draws `most` tokens from a distribution of its own, which depends on the last two tokens.
class DrawingDrafter final : public speculative::Drafter {
 public:
  // `only`: the ids that it draws; empty: all.
  explicit DrawingDrafter(int most, std::vector<int32_t> only = {})
      : most_(most), only_(std::move(only)) {}

  void propose(std::span<speculative::DraftRequest> requests) override {
    for (speculative::DraftRequest& r : requests) {
      speculative::DraftSampler sampler(r, kVocab, false);
      asked_ += r.wants_distributions ? 1 : 0;
      for (int i = 0; i < std::min(most_, r.limit); ++i) {
        std::vector<int32_t> text(r.tokens.end() - 2, r.tokens.end());
        text.insert(text.end(), r.draft.begin(), r.draft.end());
        std::vector<float> logits(static_cast<size_t>(kVocab));
        for (size_t v = 0; v < logits.size(); ++v) {
          logits[v] = 6.0f * static_cast<float>(philox_uniform(
                                 static_cast<uint64_t>(text[text.size() - 2]),
                                 static_cast<uint64_t>(text.back()), static_cast<uint32_t>(v)));
        }
        if (!only_.empty()) {
          for (int32_t id = 0; id < kVocab; ++id) {
            if (std::ranges::find(only_, id) == only_.end())
              logits[static_cast<size_t>(id)] -= 50.0f;
          }
        }
        const int32_t token =
            sampler.draws()
                ? sampler.draw(r, logits, {}, scratch_, row_)
                : static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
        r.draft.push_back(token);
      }
    }
  }
  int asked() const { return asked_; }  // for distributions; once the loop has stopped

 private:
  const int most_;
  const std::vector<int32_t> only_;
  int asked_ = 0;
  SamplerScratch scratch_{kVocab};
  std::vector<float> row_;
};

Request accept_request(int which, std::optional<Acceptance> method, bool logprobs = true) {
  Request r = request_of(which);
  if (!logprobs) r.params.logprobs = -1;
  r.params.beam_width = 0;
  if (which % 3 == 0) r.params.stop_token_ids = {which % kVocab, 40};
  if (which % 4 == 1) r.params.min_tokens = std::min(9, r.params.max_tokens);
  r.params.rejection_sample_method = method;
  return r;
}

class OptInRules : public ::testing::TestWithParam<Acceptance> {};
INSTANTIATE_TEST_SUITE_P(All, OptInRules,
                         ::testing::Values(Acceptance::kRejection, Acceptance::kBlock,
                                           Acceptance::kTypical));

// Drafts that depend on the sequence alone, and steps with room for all of them: the tokens are the
// same alone, in a batch, in chunks, without shared prefixes, and where a device samples rows.
TEST_P(OptInRules, TheBatchChangesNothing) {
  for (const bool draws : {false, true}) {
    std::vector<Outcome> want;
    DrawingDrafter drafter(4);
    {
      RigOptions plain{.share = false};
      plain.eos = {kEos};
      plain.drafter = &drafter;
      plain.acceptance.method = GetParam();
      Rig alone(plain);
      for (int i = 0; i < kRequests; ++i) want.push_back(alone.run(accept_request(i, {}, !draws)));
    }
    for (RigOptions setup : {RigOptions{}, RigOptions{.chunk = 16}}) {
      setup.eos = {kEos};
      setup.drafter = &drafter;
      setup.draws = draws;
      setup.rows = 1024;
      Rig rig(setup);
      std::vector<Pending*> sent;
      for (int i = 0; i < kRequests; ++i)
        sent.push_back(&rig.send(accept_request(i, GetParam(), !draws)));
      for (size_t i = 0; i < sent.size(); ++i) {
        const Outcome& got = Rig::wait(*sent[i]);
        expect_same(want[i], got, static_cast<int>(i));
        EXPECT_EQ(got.usage.speculation.accepted_tokens, want[i].usage.speculation.accepted_tokens);
      }
    }
  }
}

// Greedy requests have the tokens of plain ones, and drafters keep no distributions for them.
// Requests that draw have others (or the rule would not be at work).
TEST_P(OptInRules, GreedyRequestsMatch) {
  Rig plain({});
  DrawingDrafter drafter(4);
  RigOptions setup;
  setup.drafter = &drafter;
  setup.acceptance.method = GetParam();
  Rig rig(setup);
  Request greedy = request_of(0);
  greedy.params.repetition_penalty = 1.2f;
  expect_same(plain.run(greedy), rig.run(greedy), 0);
  Request drawn = request_of(1);
  drawn.params.max_tokens = 60;
  const Outcome want = plain.run(drawn);
  EXPECT_NE(rig.run(drawn).ids, want.ids);
  drawn.params.rejection_sample_method = Acceptance::kMatch;
  expect_same(want, rig.run(drawn), 1);
  rig.stop();
  EXPECT_EQ(drafter.asked() > 0, GetParam() != Acceptance::kTypical);
}

// Log-probabilities are those of the raw logits, whether a token was drafted or drawn.
TEST_P(OptInRules, LogprobsAreOfTheRow) {
  DrawingDrafter drafter(4);
  RigOptions setup;
  setup.drafter = &drafter;
  Rig rig(setup);
  Request r = request_of(1);
  r.params.frequency_penalty = 0.5f;
  r.params.max_tokens = 40;
  r.params.rejection_sample_method = GetParam();
  const Outcome got = rig.run(r);
  EXPECT_GT(got.usage.speculation.accepted_tokens, 3);
  Request read;
  read.prompt = r.prompt;
  read.prompt.insert(read.prompt.end(), got.ids[0].begin(), got.ids[0].end());
  read.params.max_tokens = 1;
  read.params.prompt_logprobs = 2;
  const Outcome scored = rig.run(read);
  ASSERT_EQ(got.logprobs[0].size(), got.ids[0].size());
  for (size_t i = 0; i < got.ids[0].size(); ++i) {
    const auto& want = scored.prompt_logprobs[r.prompt.size() + i];
    ASSERT_EQ(got.logprobs[0][i].size(), 3u);
    for (size_t k = 0; k < 3; ++k) {
      EXPECT_EQ(got.logprobs[0][i][k].id, want[k].id);
      EXPECT_EQ(got.logprobs[0][i][k].logprob, want[k].logprob);
    }
  }
}

// How different two samples of texts are: the chi-square statistic of homogeneity over the value
// that equal distributions exceed with probability 1e-6.
double chi_square_of_two(const std::map<std::string, std::array<double, 2>>& counts) {
  std::array<double, 2> sums{};
  for (const auto& [text, both] : counts) sums[0] += both[0], sums[1] += both[1];
  double chi = 0.0, df = -1.0;
  for (const auto& [text, both] : counts) {
    if (both[0] + both[1] < 20.0) continue;
    for (const size_t side : {0, 1}) {
      const double want = (both[0] + both[1]) * sums[side] / (sums[0] + sums[1]);
      chi += (both[side] - want) * (both[side] - want) / want;
    }
    ++df;
  }
  return chi / (df * std::pow(1.0 - 2.0 / (9.0 * df) + 4.7534 * std::sqrt(2.0 / (9.0 * df)), 3.0));
}

// A grammar and penalties: texts are distributed as without speculation, although many drafts are
// forbidden ones.
TEST(StepLoopAccept, GrammarsKeepTheDistribution) {
  std::vector<std::string> letters;
  for (int i = 0; i < kVocab; ++i) letters.emplace_back(1, static_cast<char>(' ' + i % 95));
  auto grammar = grammar::Grammar::from_regex(std::make_shared<const grammar::TokenTrie>(letters),
                                              "[a-c][b-d][ad]z(b|c)[abc]");
  ASSERT_TRUE(grammar.ok());
  const auto id_of = [](char letter) { return letter - ' '; };
  DrawingDrafter drafter(5,
                         {id_of('a'), id_of('b'), id_of('c'), id_of('d'), id_of('e'), id_of('f')});
  RigOptions setup;
  setup.drafter = &drafter;
  setup.max_num_seqs = 100;
  Rig rig(setup);
  for (const Acceptance method : {Acceptance::kRejection, Acceptance::kBlock}) {
    std::map<std::string, std::array<double, 2>> counts;
    for (int i = 0; i < 100; ++i) {
      for (const bool lawful : {false, true}) {
        Request r = request_of(1);
        r.params.seed = static_cast<uint64_t>(i) * 2 + (lawful ? 1 : 0);
        r.params.n = 100;
        r.params.logprobs = -1;
        r.params.temperature = 2.0f;
        r.params.frequency_penalty = 0.8f;
        r.params.grammar = *grammar;
        r.params.rejection_sample_method = lawful ? method : Acceptance::kMatch;
        for (const std::vector<int32_t>& ids : rig.run(r).ids) {
          std::string text;
          for (const int32_t id : ids) text += letters[static_cast<size_t>(id)];
          ++counts[text][lawful ? 1 : 0];
        }
      }
    }
    EXPECT_GT(counts.size(), 60u);
    EXPECT_LT(chi_square_of_two(counts), 1.0);
  }
}

// Drafts without randomness: rejection sampling is match, and the tokens are the plain ones.
TEST(StepLoopAccept, RejectionOfFixedDraftsIsMatch) {
  Rig plain({});
  std::vector<Outcome> want;
  OracleDrafter drafter(5, 0.4);
  for (int i = 0; i < kRequests; ++i) {
    want.push_back(plain.run(accept_request(i, {})));
    drafter.learn(accept_request(i, {}), want.back());
  }
  RigOptions setup;
  setup.drafter = &drafter;
  setup.acceptance = {.method = Acceptance::kRejection, .rates = {}, .count_rejections = true};
  Rig rig(setup);
  for (int i = 0; i < kRequests; ++i)
    expect_same(want[static_cast<size_t>(i)], rig.run(accept_request(i, {})), i);
}

// End to end, the expected number of rejections is the sum of total variation distances.
TEST(StepLoopAccept, RejectionsAreCounted) {
  for (const int most : {1, 4}) {
    DrawingDrafter drafter(most);
    RigOptions setup;
    setup.drafter = &drafter;
    setup.acceptance = {.method = Acceptance::kRejection, .rates = {}, .count_rejections = true};
    Rig rig(setup);
    for (int i = 0; i < 300; ++i) {
      Request r = accept_request(3 * i + 1, {});
      r.params.seed = static_cast<uint64_t>(i);
      r.params.temperature = 0.7f + 0.01f * static_cast<float>(i % 100);
      rig.run(r);
    }
    const EngineStats::Speculation s = rig.loop().stats().speculation;
    EXPECT_GT(s.rejections, 2000);
    EXPECT_GT(s.accepted_tokens, 500);
    EXPECT_GT(s.rejection_variance, 300.0);
    EXPECT_LT(std::abs(s.rejection_z()), 4.9);
    EXPECT_LE(s.rejections, s.drafts);
  }
  DrawingDrafter drafter(2);
  RigOptions setup;
  setup.drafter = &drafter;
  setup.acceptance.method = Acceptance::kRejection;
  Rig uncounted(setup);
  uncounted.run(accept_request(1, {}));
  EXPECT_EQ(uncounted.loop().stats().speculation.expected_rejections, 0.0);
}

// The share of steps in which the first i + 1 drafts are all accepted is the given rate, whatever
// the drafts are, and rows may stay on the device.
TEST(StepLoopAccept, SyntheticRates) {
  const std::vector<double> rates = {0.73, 0.52, 0.36, 0.23, 0.15};
  for (const bool draws : {false, true}) {
    DrawingDrafter drafter(5);
    RigOptions setup{.draws = draws};
    setup.drafter = &drafter;
    setup.acceptance = {.method = Acceptance::kSynthetic, .rates = rates};
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (int i = 0; i < 60; ++i) {
      Request r = request_of(i % 2);  // greedy, sampled
      r.params.logprobs = draws ? -1 : 1;
      r.params.seed = static_cast<uint64_t>(i);
      r.params.max_tokens = 400;
      sent.push_back(&rig.send(r));
    }
    for (Pending* p : sent) EXPECT_EQ(Rig::wait(*p).ids[0].size(), 400u);
    const EngineStats::Speculation s = rig.loop().stats().speculation;
    ASSERT_EQ(s.accepted_per_position.size(), rates.size());
    const auto steps = static_cast<double>(s.drafts);
    EXPECT_GT(steps, 5000);
    for (size_t i = 0; i < rates.size(); ++i) {
      const double error = std::sqrt(rates[i] * (1 - rates[i]) * steps);
      EXPECT_NEAR(static_cast<double>(s.accepted_per_position[i]), rates[i] * steps, 4.9 * error);
    }
  }
}

// Wrong drafts with wrong distributions: without the draft, with ids out of range, more or fewer
// entries than drafts.
class LyingDrafter final : public speculative::Drafter {
 public:
  void propose(std::span<speculative::DraftRequest> requests) override {
    for (speculative::DraftRequest& r : requests) {
      const auto random = [&](int what) {
        return static_cast<int32_t>(
            philox_bits(r.sequence, r.tokens.size(), static_cast<uint32_t>(what)) % 1000);
      };
      for (int i = 0; i < r.limit + 2; ++i)
        r.draft.push_back(random(i) < 30 ? random(i) * 7 - 50 : random(i) % kVocab);
      for (int i = 0; i < random(99) % 25; ++i) {
        std::vector<Candidate>& list = r.drawn_from.emplace_back();
        for (int32_t id = random(i + 100) % 3; id < kVocab + 20; id += 1 + random(id + 200) % 9)
          list.push_back({id, 0.0f, static_cast<Weight>(random(id + 300) % 5)});
      }
    }
  }
};

// Preemption, steps without room for all drafts, and lying drafters cost time alone: every request
// comes to its end, and no block is lost.
TEST_P(OptInRules, RequestsEndInNarrowSteps) {
  LyingDrafter liar;
  DrawingDrafter honest(5);
  int64_t preemptions = 0;
  for (speculative::Drafter* drafter :
       {static_cast<speculative::Drafter*>(&liar), static_cast<speculative::Drafter*>(&honest)}) {
    RigOptions narrow{.max_model_len = 160, .tokens = 64};
    narrow.blocks = {kv_cache::BlockCache::most_blocks(0, 160, 64) + 3};
    for (RigOptions setup : {narrow, RigOptions{.tokens = 7, .rows = 5}}) {
      for (const bool draws : {false, true}) {
        setup.draws = draws;
        setup.eos = {kEos};
        setup.drafter = drafter;
        setup.acceptance.method = GetParam();
        setup.acceptance.count_rejections = true;
        Rig rig(setup);
        std::vector<Pending*> sent;
        for (int i = 0; i < kRequests; ++i)
          sent.push_back(&rig.send(accept_request(i, {}, !draws)));
        for (int i = 0; i < kRequests; ++i) {
          const Outcome& got = Rig::wait(*sent[static_cast<size_t>(i)]);
          for (size_t k = 0; k < got.ids.size(); ++k) {
            EXPECT_TRUE(got.finish[k] == FinishReason::kStop ||
                        got.finish[k] == FinishReason::kLength);
            if (got.finish[k] == FinishReason::kLength) {
              EXPECT_EQ(got.ids[k].size(), static_cast<size_t>(24 + i % 5));
            }
          }
        }
        const EngineStats stats = rig.loop().stats();
        EXPECT_EQ(stats.kv_cache_usage, 0.0);
        preemptions += stats.preemptions;
      }
    }
  }
  EXPECT_GT(preemptions, 0);
}

TEST(StepLoopAccept, WrongRequests) {
  Rig plain({});
  Request r = request_of(1);
  EXPECT_FALSE(plain.loop().check(r).has_value());
  r.params.rejection_sample_method = Acceptance::kMatch;
  const auto error = plain.loop().check(r);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->field, "rejection_sample_method");
  DrawingDrafter drafter(2);
  RigOptions setup;
  setup.drafter = &drafter;
  Rig rig(setup);
  EXPECT_FALSE(rig.loop().check(r).has_value());
  r.params.rejection_sample_method = Acceptance::kSynthetic;
  EXPECT_TRUE(rig.loop().check(r).has_value());
}

}  // namespace
}  // namespace freshet::engine

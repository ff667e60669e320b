// Requests with a grammar, from the first token on or after a thought.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/oracle_drafter_test.h"
#include "engine/step_loop_rig_test.h"
#include "engine/tree_drafter_test.h"
#include "grammar/late_matcher.h"

namespace freshet::engine {
namespace {

// A letter each.
std::vector<std::string> fake_tokens() {
  std::vector<std::string> tokens;
  for (int i = 0; i < FakeModel::kVocab; ++i)
    tokens.emplace_back(1, static_cast<char>(' ' + i % 95));
  return tokens;
}
std::shared_ptr<const grammar::Grammar> pairs_and_x() {
  const auto trie = std::make_shared<const grammar::TokenTrie>(fake_tokens());
  auto grammar = grammar::Grammar::from_regex(trie, "(ab|cd){3}x");
  EXPECT_TRUE(grammar.ok()) << grammar.status().message();
  return *grammar;
}

TEST(StepLoop, KeepsToAGrammar) {
  const std::vector<std::string> tokens = fake_tokens();
  const auto grammar = pairs_and_x();
  for (const std::vector<int32_t>& eos : {std::vector<int32_t>{}, std::vector<int32_t>{95}}) {
    Rig rig({.eos = eos});
    std::set<std::string> texts;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Request r = request_of(1);
      r.params.seed = seed;
      r.params.n = 2;
      r.params.temperature = 8.0f;
      r.params.grammar = grammar;
      const Outcome& o = rig.run(r);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(o.finish[i], FinishReason::kStop);
        std::string text;
        for (const int32_t id : o.ids[i]) {
          if (std::ranges::find(eos, id) == eos.end()) text += tokens[static_cast<size_t>(id)];
        }
        ASSERT_EQ(text.size(), 7u);
        EXPECT_EQ(text.back(), 'x');
        for (size_t k = 0; k < 6; k += 2) {
          EXPECT_TRUE(text.substr(k, 2) == "ab" || text.substr(k, 2) == "cd") << text;
        }
        texts.insert(text);
      }
    }
    EXPECT_GT(texts.size(), 3u);
  }
}

// A request that thinks up to the token ")" and then answers in a grammar. One in three has to open
// the thought itself, by "(", or to answer at once.
Request thinking_request_of(int which) {
  static const auto grammar = pairs_and_x();
  static const auto thought =
      std::make_shared<const grammar::ThoughtTokens>("(", ")", fake_tokens());
  Request r = request_of(which);
  r.params.beam_width = 0;
  r.params.max_tokens = 50;
  r.params.logit_bias = {{')' - ' ', 2.0f}, {'(' - ' ', 2.0f}};
  r.params.grammar = grammar;
  r.params.thought = thought;
  r.params.in_thought = which % 3 != 0;
  return r;
}

TEST(StepLoop, AGrammarHoldsBehindTheThought) {
  Rig rig({});
  int answered = 0;
  int thinking = 0;
  int at_once = 0;
  for (int which = 0; which < 60; ++which) {
    const Request r = thinking_request_of(which);
    Request free = r;
    free.params.grammar = nullptr;
    const Outcome& all = rig.run(r);
    const Outcome& unbound = rig.run(free);
    for (size_t i = 0; i < all.ids.size(); ++i) {
      std::string text;
      for (const int32_t id : all.ids[i]) text += static_cast<char>(' ' + id % 95);
      const bool opened = r.params.in_thought || text.starts_with("(");
      const size_t close = opened ? text.find(')') : std::string::npos;
      if (r.params.in_thought) {  // the thought is the same as without a grammar
        const auto thought = std::ranges::find(unbound.ids[i], ')' - ' ');
        const size_t length = std::min(static_cast<size_t>(thought - unbound.ids[i].begin()) + 1,
                                       unbound.ids[i].size());
        ASSERT_GE(all.ids[i].size(), length);
        EXPECT_TRUE(std::equal(unbound.ids[i].begin(),
                               unbound.ids[i].begin() + static_cast<std::ptrdiff_t>(length),
                               all.ids[i].begin()));
      }
      if (opened && close == std::string::npos) {
        EXPECT_EQ(all.finish[i], FinishReason::kLength);
        EXPECT_EQ(text.size(), 50U);
        ++thinking;
        continue;
      }
      std::string answer = opened ? text.substr(close + 1) : text;
      if (opened && answer.starts_with(" ")) answer.erase(0, 1);
      if (all.finish[i] == FinishReason::kLength) continue;  // the thought was long
      EXPECT_EQ(all.finish[i], FinishReason::kStop);
      EXPECT_TRUE(answer.size() == 7 && answer.back() == 'x') << text;
      for (size_t k = 0; k + 1 < answer.size(); k += 2)
        EXPECT_TRUE(answer.substr(k, 2) == "ab" || answer.substr(k, 2) == "cd") << text;
      ++(opened ? answered : at_once);
    }
  }
  EXPECT_GT(answered, 20);
  EXPECT_GT(thinking, 0);
  EXPECT_GT(at_once, 0);
}

class LawOfThoughts : public ::testing::TestWithParam<std::vector<int>> {};
INSTANTIATE_TEST_SUITE_P(Windows, LawOfThoughts,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{0, 24},
                                           std::vector<int>{17}));

TEST_P(LawOfThoughts, BeforeGrammarsChangeNothing) {
  RigOptions narrow{.max_model_len = 192, .tokens = 64};
  for (const int window : GetParam()) {
    narrow.blocks.push_back(kv_cache::BlockCache::most_blocks(window, 192, 64) + 3);
  }
  RigOptions one{.share = false};
  one.windows = GetParam();
  Rig alone_rig(one);
  std::vector<Outcome> want;
  for (int i = 0; i < kRequests; ++i) want.push_back(alone_rig.run(thinking_request_of(i)));
  for (RigOptions setup :
       {RigOptions{}, RigOptions{.chunk = 16}, narrow,
        RigOptions{.tokens = 3, .rows = 3, .draws = true}, RigOptions{.draws = true}}) {
    setup.windows = GetParam();
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (int i = 0; i < kRequests; ++i) {
      sent.push_back(&rig.send(thinking_request_of(i)));
      rig.send(request_of(i));
    }
    for (int i = 0; i < kRequests; ++i) {
      const auto at = static_cast<size_t>(i);
      expect_same(want[at], Rig::wait(*sent[at]), i);
    }
    if (!setup.blocks.empty()) {
      EXPECT_GT(rig.loop().stats().preemptions, 0);
    }
  }
}

// Tokens that the model samples itself: no log-probabilities are wanted.
TEST(StepLoop, ADeviceDrawsThoughtsAlike) {
  Rig host({});
  Rig device({.draws = true});
  for (int i = 0; i < 30; ++i) {
    Request r = thinking_request_of(i);
    r.params.logprobs = -1;
    const Outcome& want = host.run(r);
    const Outcome& got = device.run(r);
    EXPECT_EQ(got.ids, want.ids) << "request " << i;
    EXPECT_EQ(got.finish, want.finish) << "request " << i;
  }
}

// The mask of each draft's row is that of the drafts before it.
TEST(StepLoop, DraftsKeepToTheGrammar) {
  for (const auto& [draws, trees] : {std::pair(false, false), std::pair(true, false),
                                     std::pair(false, true), std::pair(true, true)}) {
    Rig plain({});
    OracleDrafter drafter(4, 0.3);
    TreeDrafter tree(drafter, 3);
    std::vector<Request> requests;
    std::vector<Outcome> want;
    for (int i = 0; i < 30; ++i) {
      requests.push_back(thinking_request_of(i));
      if (draws) requests.back().params.logprobs = -1;
      want.push_back(plain.run(requests.back()));
      drafter.learn(requests.back(), want.back());
    }
    RigOptions setup{.draws = draws};
    setup.drafter = &drafter;
    if (trees) setup.drafter = &tree;
    setup.tree_max_batch = 1000;
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (const Request& r : requests) sent.push_back(&rig.send(r));
    for (size_t i = 0; i < sent.size(); ++i)
      expect_same(want[i], Rig::wait(*sent[i]), static_cast<int>(i));
    rig.stop();
    EXPECT_GT(drafter.proposed(), 500);
  }
}

}  // namespace
}  // namespace freshet::engine

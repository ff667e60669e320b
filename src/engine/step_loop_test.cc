#include "engine/step_loop.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>
#include <map>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <time.h>

#include "engine/step_loop_rig_test.h"

namespace freshet::engine {
namespace {

// Every request alone, on an engine that shares nothing and never waits.
const std::vector<Outcome>& alone(const std::vector<int>& windows) {
  static std::map<std::vector<int>, std::vector<Outcome>> known;
  std::vector<Outcome>& outcomes = known[windows];
  if (!outcomes.empty()) return outcomes;
  RigOptions setup;
  setup.windows = windows;
  setup.share = false;
  Rig rig(setup);
  for (int i = 0; i < kRequests; ++i) outcomes.push_back(rig.run(request_of(i)));
  return outcomes;
}

class Law : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  // Runs all requests together in `setup` and compares with each alone.
  EngineStats expect_law(RigOptions setup) {
    setup.windows = GetParam();
    Rig rig(setup);
    std::vector<Pending*> sent;
    for (int i = 0; i < kRequests; ++i) sent.push_back(&rig.send(request_of(i)));
    for (int i = 0; i < kRequests; ++i) {
      expect_same(alone(setup.windows)[static_cast<size_t>(i)],
                  Rig::wait(*sent[static_cast<size_t>(i)]), i);
    }
    return rig.loop().stats();
  }
};

TEST_P(Law, ABatchChangesNothing) {
  expect_law({.share = false});
}

TEST_P(Law, SharedPrefixesChangeNothing) {
  expect_law({});
  RigOptions setup;
  setup.windows = GetParam();
  Rig rig(setup);
  for (int i = 0; i < kRequests; ++i) {  // the second time from the cache
    rig.run(request_of(i));
    const Outcome& again = rig.run(request_of(i));
    expect_same(alone(setup.windows)[static_cast<size_t>(i)], again, i);
    EXPECT_GE(again.usage.cached_tokens, again.usage.prompt_tokens - 16);
    EXPECT_LT(again.usage.cached_tokens, again.usage.prompt_tokens);
  }
}

TEST_P(Law, ChunksChangeNothing) {
  expect_law({.chunk = 16});
  expect_law({.tokens = 16, .rows = 16});
  expect_law({.tokens = 3, .rows = 3});
}

TEST_P(Law, PreemptionChangesNothing) {
  RigOptions setup{.max_model_len = 160, .tokens = 64};
  for (const int window : GetParam()) {
    setup.blocks.push_back(kv_cache::BlockCache::most_blocks(window, 160, 64) + 3);
  }
  const EngineStats stats = expect_law(setup);
  EXPECT_GT(stats.preemptions, 0);
  setup.share = false;
  expect_law(setup);
}

// Requests whose steps may run ahead of their tokens, alone and beside requests whose may not.
TEST_P(Law, RunningAheadChangesNothing) {
  RigOptions narrow{.max_model_len = 160, .tokens = 64, .draws = true};
  for (const int window : GetParam()) {
    narrow.blocks.push_back(kv_cache::BlockCache::most_blocks(window, 160, 64) + 3);
  }
  for (RigOptions setup : {RigOptions{.draws = true}, RigOptions{.chunk = 16, .draws = true},
                           RigOptions{.tokens = 3, .rows = 3, .draws = true}, narrow}) {
    setup.windows = GetParam();
    for (const bool all : {false, true}) {
      Rig rig(setup);
      std::map<int, Pending*> sent;
      for (int i = 0; i < kRequests; ++i) {
        Request r = request_of(i);
        if (i % 5 != 2 || !all) r.params.logprobs = -1;
        if (all || i % 5 < 3) sent[i] = &rig.send(std::move(r));
      }
      for (const auto& [i, pending] : sent) {
        const Outcome& want = alone(setup.windows)[static_cast<size_t>(i)];
        const Outcome& got = Rig::wait(*pending);
        EXPECT_EQ(got.ids, want.ids) << "request " << i;
        EXPECT_EQ(got.finish, want.finish) << "request " << i;
      }
      const EngineStats stats = rig.loop().stats();
      if (all && !setup.blocks.empty()) {
        EXPECT_GT(stats.preemptions, 0);
      }
      rig.stop();
      if (!all) {
        EXPECT_GT(rig.model().ahead(), 20);
      }
    }
  }
}

TEST(StepLoop, EndsAheadOfTheirTokensChangeNothing) {
  for (const bool draws : {false, true}) {
    static std::vector<Outcome> first;
    Rig rig({.eos = {3, 11, 40}, .draws = draws});
    std::vector<Pending*> sent;
    for (int i = 0; i < 40; ++i) {
      Request r = request_of(i % 5 > 2 ? i + 3 : i);
      r.params.logprobs = -1;
      r.params.stop_token_ids = {i, i + 20};
      r.params.max_tokens = 1 + i % 9 * 8;
      r.params.min_tokens = std::min(i % 4, r.params.max_tokens);
      sent.push_back(&rig.send(std::move(r)));
    }
    for (size_t i = 0; i < sent.size(); ++i) {
      const Outcome& got = Rig::wait(*sent[i]);
      if (!draws) {
        first.push_back(got);
        continue;
      }
      EXPECT_EQ(got.ids, first[i].ids) << i;
      EXPECT_EQ(got.finish, first[i].finish) << i;
      EXPECT_EQ(got.reason, first[i].reason) << i;
      EXPECT_EQ(got.usage.completion_tokens, first[i].usage.completion_tokens) << i;
    }
    rig.stop();
    EXPECT_EQ(rig.model().ahead() > 20, draws);
  }
}

TEST(StepLoop, CancelledAheadOfTheirTokens) {
  Rig rig({.draws = true});
  std::vector<Pending*> sent;
  std::vector<std::promise<void>> begun(16);
  for (int i = 0; i < 16; ++i) {
    Request r = request_of(0);
    r.params.logprobs = -1;
    r.params.max_tokens = 400;
    r.on_delta = [&begun, i, n = 0](const Delta&) mutable {
      if (++n == 3) begun[static_cast<size_t>(i)].set_value();
    };
    sent.push_back(&rig.send(std::move(r)));
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    ASSERT_EQ(begun[i].get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
    if (i % 2 == 0) rig.loop().cancel(sent[i]->id);
  }
  for (size_t i = 0; i < sent.size(); i += 2) Rig::wait(*sent[i]);
  Request after = request_of(1);
  after.params.logprobs = -1;
  Rig alone({});
  EXPECT_EQ(rig.run(after).ids, alone.run(after).ids);
  rig.stop();  // while the others run
  for (size_t i = 1; i < sent.size(); i += 2) Rig::wait(*sent[i]);
}

TEST_P(Law, ThreadsChangeNothing) {
  expect_law({.threads = 1});
}

INSTANTIATE_TEST_SUITE_P(Windows, Law,
                         ::testing::Values(std::vector<int>{0}, std::vector<int>{0, 24},
                                           std::vector<int>{17}));

TEST(StepLoop, WhoeverHasItsAnswerIsCounted) {
  Rig rig({});
  std::promise<EngineStats> seen;
  Request r;
  r.prompt = {1, 2, 3};
  r.params.max_tokens = 7;
  r.params.ignore_eos = true;
  r.on_done = [&](const Usage&) { seen.set_value(rig.loop().stats()); };
  ASSERT_TRUE(rig.loop().submit(std::move(r)).ok());
  auto future = seen.get_future();
  ASSERT_EQ(future.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  const EngineStats stats = future.get();
  EXPECT_EQ(stats.generated_tokens, 7);
  EXPECT_EQ(stats.prompt_tokens, 3);
  EXPECT_EQ(stats.steps, 7);
  EXPECT_EQ(stats.step_tokens, 3 + 7);
  EXPECT_EQ(stats.running, 0);
}

TEST(StepLoop, AnEmbeddingsStepIsCountedBeforeItIsTold) {
  Rig rig({});
  std::promise<EngineStats> seen;
  Request r;
  r.prompt = {1, 2, 3};
  r.pooling = Pooling::kLast;
  r.on_done = [&](const Usage&) { seen.set_value(rig.loop().stats()); };
  ASSERT_TRUE(rig.loop().submit(std::move(r)).ok());
  auto future = seen.get_future();
  ASSERT_EQ(future.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  const EngineStats stats = future.get();
  EXPECT_EQ(stats.steps, 1);
  EXPECT_EQ(stats.step_tokens, 3);
}

TEST(StepLoop, EachBeamIsATokenOfAStep) {
  Rig rig({});
  std::promise<EngineStats> seen;
  Request r;
  r.prompt = {1, 2, 3};
  r.params.max_tokens = 4;
  r.params.ignore_eos = true;
  r.params.temperature = 0;
  r.params.beam_width = 2;
  r.on_done = [&](const Usage&) { seen.set_value(rig.loop().stats()); };
  ASSERT_TRUE(rig.loop().submit(std::move(r)).ok());
  auto future = seen.get_future();
  ASSERT_EQ(future.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  const EngineStats stats = future.get();
  EXPECT_EQ(stats.steps, 4);
  EXPECT_EQ(stats.step_tokens, 3 + 1 + 3 * 2);
}

TEST(StepLoop, SamplesDiffer) {
  Rig rig({});
  Request r = request_of(1);
  r.params.n = 4;
  r.params.temperature = 1.0f;
  const Outcome& o = rig.run(r);
  EXPECT_NE(o.ids[0], o.ids[1]);
  EXPECT_NE(o.ids[1], o.ids[2]);
  EXPECT_EQ(o.usage.completion_tokens, 4 * r.params.max_tokens);
  EXPECT_EQ(o.usage.seed, 2u);
}

TEST(StepLoop, PromptLogprobsAreThoseOfTheSameTokensAsOutput) {
  // The log-probability of a token must not depend on whether it was generated or given.
  Rig rig({.rows = 5});
  Request r = request_of(0);
  r.params.logprobs = 3;
  const Outcome written = rig.run(r);
  Request given = r;
  given.prompt.insert(given.prompt.end(), written.ids[0].begin(), written.ids[0].end());
  given.params.prompt_logprobs = 3;
  given.params.max_tokens = 1;
  const Outcome& o = rig.run(given);
  ASSERT_EQ(o.prompt_logprobs.size(), given.prompt.size());
  EXPECT_TRUE(o.prompt_logprobs[0].empty());
  for (size_t i = 1; i < r.prompt.size(); ++i) EXPECT_EQ(o.prompt_logprobs[i].size(), 4u);
  for (size_t i = 0; i < written.ids[0].size(); ++i) {
    const auto& a = written.logprobs[0][i];
    const auto& b = o.prompt_logprobs[r.prompt.size() + i];
    ASSERT_EQ(a.size(), b.size());
    for (size_t k = 0; k < a.size(); ++k) {
      EXPECT_EQ(a[k].id, b[k].id);
      EXPECT_EQ(a[k].logprob, b[k].logprob);
    }
  }
}

TEST(StepLoop, EmbedsTheSameHoweverItRuns) {
  const auto embed = [](Rig& rig, Pooling pooling, int which) {
    Request r;
    r.prompt = prompt_of(100, which);
    r.pooling = pooling;
    std::vector<float> embedding;
    r.on_embedding = [&](const std::vector<float>& e) { embedding = e; };
    const Outcome& o = rig.run(r);
    EXPECT_TRUE(o.ids[0].empty());
    EXPECT_EQ(embedding.size(), 1u);
    return embedding.empty() ? 0.0f : embedding[0];
  };
  Rig whole({.windows = {0, 24}});
  Rig chunks({.windows = {0, 24}, .tokens = 7, .rows = 7});
  for (const Pooling pooling : {Pooling::kLast, Pooling::kMean}) {
    for (int i = 0; i < 3; ++i) {
      const float e = embed(whole, pooling, i);
      EXPECT_GT(e, 0.0f);
      EXPECT_EQ(embed(chunks, pooling, i), e);
      EXPECT_EQ(embed(whole, pooling, i), e);  // with a cached prefix
      EXPECT_NE(embed(whole, pooling, i + 10), e);
    }
  }
  // The mean of all positions equals the mean of the last positions of all prefixes.
  double sum = 0.0;
  const std::vector<int32_t> prompt = prompt_of(5, 1);
  for (size_t n = 1; n <= prompt.size(); ++n) {
    Request r;
    r.prompt.assign(prompt.begin(), prompt.begin() + static_cast<long>(n));
    r.pooling = Pooling::kLast;
    r.on_embedding = [&](const std::vector<float>& e) { sum += static_cast<double>(e[0]); };
    whole.run(r);
  }
  Request mean;
  mean.prompt = prompt;
  mean.pooling = Pooling::kMean;
  mean.on_embedding = [&](const std::vector<float>& e) {
    EXPECT_FLOAT_EQ(e[0], static_cast<float>(sum / 5.0));
  };
  whole.run(mean);
}

// With the best priority its tokens come first in the plan, and behind single tokens in the batch.
TEST(StepLoop, EmbedsTheSameBesideDecodingSequences) {
  Request r;
  r.prompt = prompt_of(100, 1);
  r.pooling = Pooling::kMean;
  r.priority = -1;
  std::vector<float> alone, beside;
  Rig plain({.tokens = 20});
  r.on_embedding = [&](const std::vector<float>& e) { alone = e; };
  plain.run(r);
  Rig rig({.max_model_len = 1 << 14, .tokens = 20});
  std::vector<Pending*> decoding;
  for (int i = 0; i < 4; ++i) {
    Request other = request_of(1);
    other.params.max_tokens = 10000;
    decoding.push_back(&rig.send(std::move(other)));
  }
  while (rig.loop().stats().generated_tokens < 100) std::this_thread::yield();
  r.on_embedding = [&](const std::vector<float>& e) { beside = e; };
  rig.run(r);
  EXPECT_EQ(rig.loop().stats().running, 4);
  EXPECT_EQ(beside, alone);
  EXPECT_EQ(alone.size(), 1u);
  rig.stop();
  for (Pending* p : decoding) Rig::wait(*p);
}

TEST(StepLoop, EndsAtEosAndStopTokens) {
  Request r = request_of(0);
  Rig free({});
  const std::vector<int32_t> ids = free.run(r).ids[0];
  const int32_t tenth = ids[9];
  const auto first = static_cast<size_t>(std::find(ids.begin(), ids.end(), tenth) - ids.begin());

  Rig rig({.eos = {tenth}});
  const Outcome eos = rig.run(r);
  EXPECT_EQ(eos.ids[0],
            std::vector<int32_t>(ids.begin(), ids.begin() + static_cast<long>(first) + 1));
  EXPECT_EQ(eos.finish[0], FinishReason::kStop);
  EXPECT_EQ(eos.reason[0], "");

  r.params.ignore_eos = true;
  EXPECT_EQ(rig.run(r).ids[0], ids);
  r.params.stop_token_ids = {tenth};
  const Outcome& stopped = rig.run(r);
  EXPECT_EQ(stopped.ids[0].size(), first + 1);
  EXPECT_EQ(stopped.reason[0], std::to_string(tenth));

  r.params.min_tokens = 20;
  const Outcome& later = rig.run(r);
  EXPECT_GE(later.ids[0].size(), 20u);
  EXPECT_EQ(std::count(later.ids[0].begin(), later.ids[0].begin() + 19, tenth), 0);
}

TEST(StepLoop, TheLongestSequenceEndsByLength) {
  Rig rig({.max_model_len = 64});
  Request r;
  r.prompt = prompt_of(60, 0);
  r.params.max_tokens = 1000;
  const Outcome& o = rig.run(r);
  EXPECT_EQ(o.ids[0].size(), 4u);
  EXPECT_EQ(o.finish[0], FinishReason::kLength);
}

TEST(StepLoop, RefusesWhatCannotBe) {
  Rig rig({.max_model_len = 64, .max_num_seqs = 4});
  const auto refused = [&](auto change) {
    Request r;
    r.prompt = {1, 2, 3};
    change(r);
    const auto id = rig.loop().submit(std::move(r));
    EXPECT_FALSE(id.ok());
    EXPECT_EQ(id.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(id.status().message().find('\n'), std::string::npos);
    return id.status().message();
  };
  EXPECT_NE(refused([](Request& r) { r.prompt.clear(); }).find("empty"), std::string::npos);
  EXPECT_NE(refused([](Request& r) { r.prompt.assign(64, 1); }).find("64 tokens"),
            std::string::npos);
  EXPECT_NE(refused([](Request& r) { r.prompt[1] = -1; }).find("token id -1"), std::string::npos);
  EXPECT_NE(refused([](Request& r) { r.prompt[1] = FakeModel::kVocab; }).find("token id 97"),
            std::string::npos);
  refused([](Request& r) { r.params.temperature = std::numeric_limits<float>::quiet_NaN(); });
  refused([](Request& r) { r.params.top_p = 1.5f; });
  refused([](Request& r) { r.params.n = 5; });
  refused([](Request& r) { r.params.beam_width = 5; });
  refused([](Request& r) { r.params.max_tokens = 0; });
  refused([](Request& r) { r.params.stop = {"x"}; });  // there is no vocabulary here
  refused([](Request& r) { r.deadline_s = -1; });
  refused([](Request& r) { r.deadline_s = std::numeric_limits<double>::quiet_NaN(); });
}

TEST(StepLoop, CancelsAndKeepsRunningOthers) {
  Rig rig({.max_model_len = 4096, .blocks = {600}});
  Request endless = request_of(0);
  endless.params.max_tokens = 4000;
  Pending& doomed = rig.send(endless);
  Pending& other = rig.send(request_of(1));
  rig.loop().cancel(doomed.id);
  rig.loop().cancel(doomed.id);
  rig.loop().cancel(123456);
  EXPECT_EQ(Rig::wait(doomed).finish[0], FinishReason::kCancelled);
  expect_same(alone({0})[1], Rig::wait(other), 1);
}

TEST(StepLoop, ADeadlinePasses) {
  Rig rig({.max_model_len = 1 << 16, .max_num_seqs = 1, .tokens = 16, .blocks = {1 << 12}});
  Request slow = request_of(0);
  slow.params.max_tokens = 60000;
  slow.deadline_s = 0.05;
  Request behind = request_of(0);
  behind.deadline_s = 0.01;
  Pending& a = rig.send(slow);
  Pending& b = rig.send(behind);
  EXPECT_EQ(Rig::wait(a).finish[0], FinishReason::kCancelled);
  EXPECT_EQ(Rig::wait(b).finish[0], FinishReason::kCancelled);
}

TEST(StepLoop, AFullQueueRefuses) {
  Rig rig({.max_model_len = 1 << 16, .max_num_seqs = 1, .max_queued = 2, .blocks = {1 << 12}});
  Request slow = request_of(0);
  slow.params.max_tokens = 60000;
  Pending& running = rig.send(slow);
  while (rig.loop().stats().running == 0) std::this_thread::yield();
  Pending& first = rig.send(request_of(0));
  Pending& second = rig.send(request_of(0));
  const auto third = rig.loop().submit(request_of(0));
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.status().code(), StatusCode::kResourceExhausted);
  rig.loop().cancel(running.id);
  EXPECT_EQ(Rig::wait(first).finish[0], FinishReason::kLength);
  const Outcome& waited = Rig::wait(second);
  EXPECT_EQ(waited.finish[0], FinishReason::kLength);
  EXPECT_FALSE(waited.usage.waited.empty());
  EXPECT_TRUE(rig.loop().submit(request_of(0)).ok());
}

TEST(StepLoop, EndingTheEngineEndsItsRequests) {
  Rig rig({.max_model_len = 1 << 16, .blocks = {1 << 13}});
  Request slow = request_of(3);
  slow.params.max_tokens = 60000;
  Pending& a = rig.send(slow);
  Pending& b = rig.send(slow);
  rig.stop();
  for (Pending* p : {&a, &b}) {
    for (const FinishReason reason : Rig::wait(*p).finish)
      EXPECT_EQ(reason, FinishReason::kCancelled);
  }
}

TEST(StepLoop, ManyThreadsSubmitAndCancel) {
  Rig rig({.max_model_len = 160, .max_num_seqs = 16, .blocks = {40}});
  std::atomic<int> done = 0, sent = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        Request r = request_of(t * 50 + i);
        r.on_done = [&](const Usage&) { ++done; };
        const auto id = rig.loop().submit(std::move(r));
        if (!id.ok()) continue;
        ++sent;
        if (i % 3 == 0) rig.loop().cancel(*id);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (int i = 0; i < 6000 && done < sent; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(done, sent);
  EXPECT_EQ(sent, 200);
  for (int i = 0; i < 6000 && rig.loop().stats().running > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(rig.loop().stats().kv_cache_usage, 0.0);
}

TEST(StepLoop, IdlenessCostsNothing) {
  Rig rig({});
  rig.run(request_of(0));
  const auto cpu_ms = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
  };
  // The pool's workers fall asleep first, which takes longer on a busy machine.
  double least = 1e3;
  for (int i = 0; i < 30 && least >= 5.0; ++i) {
    const double before = cpu_ms();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    least = std::min(least, cpu_ms() - before);
  }
  EXPECT_LT(least, 5.0);  // half a percent of a core
}

}  // namespace
}  // namespace freshet::engine

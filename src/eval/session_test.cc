#include "eval/session.h"

#include <algorithm>
#include <cmath>
#include <future>

#include <gtest/gtest.h>

#include "freshet/engine.h"

namespace freshet::eval {
namespace {

SessionOptions options_of(const char* model) {
  SessionOptions options;
  options.model = std::string(FRESHET_UNPACKED_DATA) + "/seeded/" + model;
  options.threads = 1;
  options.context = 32;
  return options;
}

// Whoever gives pieces of text alone is told before a step runs.
TEST(Session, OpensOnlyWhatItsUserCanFeed) {
  for (const char* model : {"t5", "whisper"}) {
    SessionOptions options = options_of(model);
    const auto refused = Session::open(options);
    ASSERT_FALSE(refused.ok()) << model;
    EXPECT_NE(refused.status().message().find("encoder-decoder"), std::string::npos);
    options.encodes = true;
    EXPECT_TRUE(Session::open(options).ok()) << model;
  }
  SessionOptions options = options_of("bert");
  EXPECT_FALSE(Session::open(options).ok());
  options.states = true;
  EXPECT_TRUE(Session::open(options).ok());
}

constexpr int kPrompt = 24, kGenerated = 60;

SessionOptions golden_llama(const char* policy) {
  SessionOptions options;
  options.model = FRESHET_UNPACKED_DATA "/golden/llama";
  options.kv_cache_dtype = "f32";
  options.threads = 1;
  options.context = kPrompt + kGenerated;
  options.batch = options.logit_rows = 40;
  options.sequences = 2;
  if (policy != nullptr) options.eviction = *kv_cache::make_retention(policy);
  return options;
}

// Logits of the second sequence, given in pieces, each after one of the first.
std::vector<float> logits_of(Session& session, const std::vector<int32_t>& ids) {
  std::vector<float> all;
  constexpr size_t kPiece = 17;
  for (size_t at = 0; at < ids.size(); at += kPiece) {
    const auto part = std::span(ids).subspan(at, std::min(kPiece, ids.size() - at));
    const Session::Piece pieces[] = {{0, part, -1}, {1, part, 0}};
    const std::span<const float> logits = session.run(pieces);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

// The engine generates behind a prompt of `budget` tokens; a session that reads the same text in
// pieces gives every token the same logits, bit for bit.
TEST(Session, EvictsAsTheEngineDoes) {
  for (const char* policy : {R"({"policy": "mikv", "budget": 24, "interval": 8})",
                             R"({"policy": "h2o", "budget": 24, "interval": 8})",
                             R"({"policy": "snapkv", "budget": 24, "interval": 10})"}) {
    EngineOptions o;
    o.model = golden_llama(nullptr).model;
    o.kv_cache_dtype = "f32";
    o.kv_eviction = policy;
    o.threads = 1;
    o.max_model_len = 128;
    auto engine = Engine::load(o);
    ASSERT_TRUE(engine.ok()) << engine.status().message();
    Request r;
    for (int i = 0; i < kPrompt; ++i)
      r.prompt.push_back((i * 37 + 3) % (*engine)->model().spec().vocab_size);
    r.params.max_tokens = kGenerated;
    r.params.ignore_eos = true;
    r.params.logprobs = 1;
    r.params.temperature = 0.0f;
    std::vector<int32_t> ids = r.prompt;
    std::vector<float> logprobs;
    std::promise<void> done;
    r.on_delta = [&](const Delta& d) {
      ids.insert(ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) logprobs.push_back(list.front().logprob);
    };
    r.on_done = [&](const Usage&) { done.set_value(); };
    ASSERT_TRUE((*engine)->submit(std::move(r)).ok());
    done.get_future().wait();
    EXPECT_GT((*engine)->stats().kv_evictions, 3);
    ASSERT_EQ(ids.size(), static_cast<size_t>(kPrompt + kGenerated));

    auto session = Session::open(golden_llama(policy));
    ASSERT_TRUE(session.ok()) << session.status().message();
    const std::vector<float> logits = logits_of(**session, ids);
    const auto vocab = static_cast<size_t>((*session)->model().spec().vocab_size);
    for (size_t i = kPrompt; i < ids.size(); ++i) {
      const auto row = std::span(logits).subspan((i - 1) * vocab, vocab);
      const auto best = std::ranges::max_element(row);
      EXPECT_EQ(best - row.begin(), ids[i]) << policy << " at " << i;
      double sum = 0.0;
      for (const float x : row) sum += std::exp(double{x} - double{*best});
      EXPECT_NEAR(logprobs[i - kPrompt], -std::log(sum), 1e-5) << policy << " at " << i;
    }
    // The sequence begins anew, and forgets nothing that fits the budget.
    (*session)->reset(0);
    (*session)->reset(1);
    EXPECT_EQ(logits_of(**session, ids), logits);
    auto plain = Session::open(golden_llama(nullptr));
    ASSERT_TRUE(plain.ok());
    const std::vector<float> full = logits_of(**plain, ids);
    EXPECT_NE(full, logits);
    EXPECT_TRUE(std::equal(full.begin(), full.begin() + kPrompt * vocab, logits.begin()));
  }
}

TEST(Session, ABudgetForAllTokensChangesNoBit) {
  std::vector<int32_t> ids;
  for (int i = 0; i < kPrompt + kGenerated; ++i) ids.push_back(i * 31 % 90);
  auto plain = Session::open(golden_llama(nullptr));
  auto mikv = Session::open(golden_llama(R"({"policy": "mikv", "budget": 84})"));
  ASSERT_TRUE(plain.ok() && mikv.ok());
  EXPECT_EQ(logits_of(**mikv, ids), logits_of(**plain, ids));
}

TEST(Session, RefusesWhatEvictsAfterPromptsOnly) {
  const auto refused = Session::open(golden_llama(R"({"policy": "snapkv", "budget": 24})"));
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("snapkv-512-64"), std::string::npos);
}

TEST(Evictions, CountBytesPerToken) {
  KvCacheSpec cache;
  cache.layers.resize(1);
  cache.layers[0].shape = {ops::KvType::kF16, 2, 64, 64};
  cache.groups = {{0, {0}}};
  const double each = 512.0;  // of a token
  const auto mikv = *kv_cache::make_retention(R"({"policy": "mikv", "budget": 100})");
  const auto h2o = *kv_cache::make_retention(R"({"policy": "h2o", "budget": 100})");
  EXPECT_EQ(Evictions::bytes_per_token(*mikv, cache, 100), each);
  // 300 tokens: 192 evicted at 292, and 8 behind them.
  EXPECT_NEAR(Evictions::bytes_per_token(*h2o, cache, 300), each * 108 / 300, 1e-9);
  EXPECT_NEAR(Evictions::bytes_per_token(*mikv, cache, 300), each * (108 + 64) / 300, 1e-9);
}

}  // namespace
}  // namespace freshet::eval

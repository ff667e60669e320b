// The law of the batch on every architecture: a request's tokens and log-probabilities are the
// same, bit for bit, alone, in a batch of 64, with a cached prefix, in chunks and after preemption,
// greedy and sampled; on some with small keys and values. With FRESHET_EXTRA_DATA also on the
// trained models there (models/).
#include <algorithm>
#include <bit>
#include <filesystem>
#include <future>
#include <memory>

#include <gtest/gtest.h>

#include "freshet/engine.h"
#include "kv_cache/block_cache.h"
#include "layers/model.h"

#ifndef FRESHET_EXTRA_DATA
#define FRESHET_EXTRA_DATA ""
#endif

namespace freshet {
namespace {

constexpr int kRequests = 64;
constexpr int kPrefix = 40;  // tokens that the longer prompts begin with

struct Outcome {
  std::vector<int32_t> ids;
  std::vector<uint32_t> logprobs;  // bits
  bool operator==(const Outcome&) const = default;
};

struct Replies {
  std::vector<Outcome> outcomes;
  int most_running = 0;
  // Requests that were preempted.
  int greedy_preempted = 0;
  int sampled_preempted = 0;
};

// One of each kind of state, alone and beside attention.
std::vector<std::string> models_with_states() {
  std::vector<std::string> found;
  for (const char* seeded :
       {"lfm2", "mamba", "mamba2", "jamba", "falcon-h1", "qwen3-next", "minimax", "zamba2"}) {
    found.push_back(FRESHET_UNPACKED_DATA "/seeded/" + std::string(seeded));
  }
  return found;
}

std::vector<std::string> models() {
  std::vector<std::string> found;
  const std::string golden = FRESHET_UNPACKED_DATA "/golden";
  for (const auto& entry : std::filesystem::directory_iterator(golden)) {
    if (entry.is_directory()) found.push_back(entry.path());
  }
  const std::string extra = FRESHET_EXTRA_DATA;
  for (const char* trained : {"target", "draft", "tiny"}) {
    const std::string path = extra + "/models/" + trained;
    if (!extra.empty() && std::filesystem::is_directory(path)) found.push_back(path);
  }
  std::ranges::sort(found);
  for (const char* small : {"llama+int8", "gpt-oss+int8", "deepseek-v3+int8", "gemma2+fp8",
                            "llama+int4", "gpt-oss+k8v4", "gemma2+int4"}) {
    found.push_back(golden + "/" + small);
  }
  // Attention in chunks and everywhere; experts chosen one by one.
  for (const char* seeded : {"llama4-text", "phimoe"}) {
    found.push_back(FRESHET_UNPACKED_DATA "/seeded/" + std::string(seeded));
  }
  for (const std::string& model : models_with_states()) found.push_back(model);
  return found;
}

class GoldenLaw : public ::testing::TestWithParam<std::string> {
 protected:
  // Golden models have few positions; the trained ones get prompts of many blocks.
  static bool trained() { return GetParam().find("/models/") != std::string::npos; }
  static int max_len() { return trained() ? 384 : 128; }
  static int longest_prompt() { return trained() ? 330 : 92; }
  static int new_tokens() { return trained() ? 24 : 12; }

  // A model, and after a plus the type of its cache.
  static std::string kv_type() {
    const size_t plus = GetParam().rfind('+');
    return plus == std::string::npos ? "f16" : GetParam().substr(plus + 1);
  }

  std::unique_ptr<Engine> load(EngineOptions o) {
    o.model = GetParam().substr(0, GetParam().rfind('+'));
    o.kv_cache_dtype = kv_type();
    o.threads = 2;
    o.max_model_len = max_len();
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }

  static bool is_greedy(int which) { return which % 2 == 0; }

  static std::vector<int32_t> allowed(int vocab) {
    std::vector<int32_t> ids;
    for (int id = 0; id < vocab; id += 3) ids.push_back(id);
    return ids;
  }

  static Request request_of(int which, int vocab) {
    Request r;
    const int length = 3 + which * 29 % (longest_prompt() - 2);
    for (int i = 0; i < length; ++i) {
      r.prompt.push_back((i * 37 + (i < kPrefix ? 0 : which * 11) + 3) % vocab);
    }
    SamplingParams& p = r.params;
    p.max_tokens = new_tokens();
    p.ignore_eos = true;
    p.logprobs = 1;
    p.seed = static_cast<uint64_t>(which);
    p.temperature = is_greedy(which) ? 0.0f : 0.8f;
    if (which % 4 == 2) p.repetition_penalty = 1.3f;
    if (which % 8 == 5) {  // what may come next depends on the text
      p.no_repeat_ngram_size = 2;
      p.bad_words = {{5}, {7, 9}, {11, 12, 13}};
    }
    if (which % 8 == 6) {
      p.allowed_token_ids = allowed(vocab);
      p.begin_suppress_tokens = {0, 3, 6};
    }
    if (which % 4 == 3) {
      p.top_k = 40;
      p.top_p = 0.9f;
      p.presence_penalty = 0.5f;
    }
    return r;
  }

  enum class Order {
    kOneByOne,
    kTogether,
    kPushing,  // when requests of the first half run, the second comes with a better priority
  };

  // Callbacks hold the step loop at a request's first token until others have been submitted.
  struct Gates {
    std::promise<void> half_submitted, all_submitted, sampled_runs;
    std::shared_future<void> half = half_submitted.get_future().share();
    std::shared_future<void> all = all_submitted.get_future().share();
    bool sampled_ran = false;

    void pass(Order order, int which) {
      if (order == Order::kTogether) all.wait();
      if (order != Order::kPushing) return;
      half.wait();
      if (is_greedy(which) || sampled_ran) return;
      sampled_ran = true;
      sampled_runs.set_value();
      all.wait();
    }
  };

  static Request request_with_callbacks(int which, Engine& engine, Order order, Gates& gates,
                                        Replies& replies, std::promise<void>& done) {
    Request r = request_of(which, engine.model().spec().vocab_size);
    Outcome& o = replies.outcomes[static_cast<size_t>(which)];
    r.on_delta = [&, order, which](const Delta& d) {
      if (o.ids.empty()) gates.pass(order, which);
      replies.most_running = std::max(replies.most_running, engine.stats().running);
      o.ids.insert(o.ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) {
        for (const TokenLogprob& t : list) o.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
      }
    };
    r.on_done = [&, which](const Usage& u) {
      if (u.preemptions > 0)
        ++(is_greedy(which) ? replies.greedy_preempted : replies.sampled_preempted);
      done.set_value();
    };
    r.priority = order == Order::kPushing && which < kRequests / 2 ? 1 : 0;
    return r;
  }

  static Replies run(Engine& engine, Order order) {
    Replies replies;
    replies.outcomes.resize(kRequests);
    std::vector<std::promise<void>> done(kRequests);
    Gates gates;
    for (int i = 0; i < kRequests; ++i) {
      if (order == Order::kPushing && i == kRequests / 2) {
        gates.half_submitted.set_value();
        gates.sampled_runs.get_future().wait();
      }
      std::promise<void>& mine = done[static_cast<size_t>(i)];
      const auto id = engine.submit(request_with_callbacks(i, engine, order, gates, replies, mine));
      EXPECT_TRUE(id.ok()) << id.status().message();
      if (order == Order::kOneByOne) mine.get_future().wait();
    }
    gates.all_submitted.set_value();
    for (int i = 0; order != Order::kOneByOne && i < kRequests; ++i)
      done[static_cast<size_t>(i)].get_future().wait();
    return replies;
  }

  // Room for the longest sequence and a few more.
  static size_t tight_cache(const Model& model, int chunk) {
    const KvCacheSpec kv = kv_cache_spec(model.spec(), *ops::kv_type_by_name(kv_type()));
    size_t bytes = 0;
    for (size_t g = 0; g < kv.groups.size(); ++g) {
      const int32_t most = kv_cache::BlockCache::most_blocks(kv.groups[g], max_len(), chunk);
      bytes += kv.block_bytes(static_cast<int>(g)) *
               static_cast<size_t>(kv.groups[g].kind == KvKind::kState ? most + 2 : most + 24);
    }
    return bytes;
  }
};

void expect_same(const Replies& run, const std::vector<Outcome>& alone, const char* how) {
  for (size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(run.outcomes[i].ids, alone[i].ids) << how << ": request " << i;
    EXPECT_EQ(run.outcomes[i].logprobs, alone[i].logprobs) << how << ": request " << i;
  }
}

TEST_P(GoldenLaw, Holds) {
  EngineOptions plain;
  plain.enable_prefix_caching = false;
  const auto first = load(plain);
  ASSERT_NE(first, nullptr);
  const std::vector<Outcome> alone = run(*first, Order::kOneByOne).outcomes;
  for (const Outcome& o : alone) {
    EXPECT_EQ(o.ids.size(), static_cast<size_t>(new_tokens()));
    EXPECT_EQ(o.logprobs.size(), static_cast<size_t>(2 * new_tokens()));
  }
  const Replies batched = run(*first, Order::kTogether);
  expect_same(batched, alone, "batched");
  EXPECT_EQ(batched.most_running, kRequests);

  const auto cached = load({});
  ASSERT_NE(cached, nullptr);
  expect_same(run(*cached, Order::kTogether), alone, "sharing prefixes");
  const int64_t shared = cached->stats().cached_tokens;
  expect_same(run(*cached, Order::kOneByOne), alone, "from the cache");
  EXPECT_GT(cached->stats().cached_tokens - shared, kRequests * 16);

  EngineOptions chunked;
  chunked.max_num_batched_tokens = 16;
  const auto narrow = load(chunked);
  ASSERT_NE(narrow, nullptr);
  expect_same(run(*narrow, Order::kTogether), alone, "in steps of 16 tokens");

  chunked.max_num_batched_tokens = 2048;
  chunked.max_prefill_chunk = 16;
  chunked.enable_prefix_caching = false;
  const auto wide = load(chunked);
  ASSERT_NE(wide, nullptr);
  const Replies in_chunks = run(*wide, Order::kTogether);
  expect_same(in_chunks, alone, "batched, in chunks of 16");
  EXPECT_EQ(in_chunks.most_running, kRequests);
}

TEST_P(GoldenLaw, HoldsAfterPreemption) {
  EngineOptions plain;
  plain.enable_prefix_caching = false;
  const auto first = load(plain);
  ASSERT_NE(first, nullptr);
  const std::vector<Outcome> alone = run(*first, Order::kOneByOne).outcomes;

  EngineOptions tight;
  tight.max_num_batched_tokens = 256;
  tight.enable_prefix_caching = false;
  tight.kv_cache_memory = tight_cache(first->model(), 256);
  const auto crowded = load(tight);
  ASSERT_NE(crowded, nullptr);
  const Replies pushed = run(*crowded, Order::kPushing);
  expect_same(pushed, alone, "preempted");
  // A state does not grow, so only a request that pushes in front takes another's slot.
  const KvCacheSpec kv = kv_cache_spec(first->model().spec(), ops::KvType::kF16);
  if (kv.groups.size() > 1 || kv.state_group() < 0) EXPECT_GT(pushed.greedy_preempted, 0);
  EXPECT_GT(pushed.sampled_preempted, 0);
  RecordProperty("preemptions", static_cast<int>(crowded->stats().preemptions));
}

// The state in front of each rejected draft comes back.
class GoldenStateLaw : public GoldenLaw {};

TEST_P(GoldenStateLaw, HoldsWithDrafts) {
  const auto first = load({});
  ASSERT_NE(first, nullptr);
  const std::vector<Outcome> alone = run(*first, Order::kOneByOne).outcomes;
  EngineOptions drafting;
  drafting.speculative_config =
      R"({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})";
  const auto drafts = load(drafting);
  ASSERT_NE(drafts, nullptr);
  expect_same(run(*drafts, Order::kOneByOne), alone, "drafted, one by one");
  expect_same(run(*drafts, Order::kTogether), alone, "drafted, together");
  const EngineStats::Speculation counted = drafts->stats().speculation;
  EXPECT_GT(counted.draft_tokens, counted.accepted_tokens);
  EXPECT_GT(counted.draft_tokens, 50);
}

std::string name_of(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = std::filesystem::path(info.param).filename();
  std::ranges::replace(name, '-', '_');
  std::ranges::replace(name, '+', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(States, GoldenStateLaw, ::testing::ValuesIn(models_with_states()),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Models, GoldenLaw, ::testing::ValuesIn(models()), name_of);

}  // namespace
}  // namespace freshet

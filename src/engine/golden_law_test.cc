// The law of the batch on every architecture: a request's tokens and log-probabilities are the
// same, bit for bit, alone, in a batch, with a cached prefix, in chunks and after preemption.
#include <algorithm>
#include <filesystem>
#include <future>
#include <memory>

#include <gtest/gtest.h>

#include "freshet/engine.h"
#include "kv_cache/block_cache.h"
#include "layers/model.h"

namespace freshet {
namespace {

constexpr int kRequests = 20;
constexpr int kNewTokens = 12;
constexpr int kMaxLen = 128;

struct Outcome {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  bool operator==(const Outcome&) const = default;
};

std::string folder() {
  return std::string(FRESHET_SOURCE_DIR) + "/tests/data/golden";
}

std::vector<std::string> models() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder())) {
    if (entry.is_directory()) names.push_back(entry.path().filename());
  }
  std::ranges::sort(names);
  return names;
}

class GoldenLaw : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<Engine> load(EngineOptions o) {
    o.model = folder() + "/" + GetParam();
    o.threads = 2;
    o.max_model_len = kMaxLen;
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }

  static Request request_of(int which, int vocab) {
    Request r;
    const int length = 3 + which * 29 % 90;
    for (int i = 0; i < length; ++i) {
      r.prompt.push_back((i * 37 + (i < 40 ? 0 : which * 11) + 3) % vocab);
    }
    r.params.max_tokens = kNewTokens;
    r.params.ignore_eos = true;
    r.params.logprobs = 1;
    r.params.seed = static_cast<uint64_t>(which);
    r.params.temperature = which % 2 == 0 ? 0.0f : 0.8f;
    return r;
  }

  enum class Order {
    kOneByOne,
    kTogether,
    kPushing,  // when the first half runs, the second comes with a better priority
  };

  static std::vector<Outcome> run(Engine& engine, Order order) {
    std::vector<Outcome> outcomes(kRequests);
    std::vector<std::promise<void>> done(kRequests);
    std::promise<void> begun;  // the first token of all is there; its callback holds the step loop
    std::promise<void> all_submitted;
    if (order != Order::kPushing) all_submitted.set_value();
    const auto go_on = all_submitted.get_future().share();
    for (int i = 0; i < kRequests; ++i) {
      const auto at = static_cast<size_t>(i);
      Request r = request_of(i, engine.model().spec().vocab_size);
      r.on_delta = [&outcomes, &begun, go_on, at](const Delta& d) {
        if (at == 0 && outcomes[at].ids.empty()) begun.set_value();
        go_on.wait();
        Outcome& o = outcomes[at];
        o.ids.insert(o.ids.end(), d.ids.begin(), d.ids.end());
        for (const auto& list : d.logprobs) {
          for (const TokenLogprob& t : list) o.logprobs.push_back(t.logprob);
        }
      };
      r.on_done = [&done, at](const Usage&) { done[at].set_value(); };
      r.priority = order == Order::kPushing && i < kRequests / 2 ? 1 : 0;
      if (order == Order::kPushing && i == kRequests / 2) begun.get_future().wait();
      const auto id = engine.submit(std::move(r));
      EXPECT_TRUE(id.ok()) << id.status().message();
      if (order == Order::kOneByOne) done[at].get_future().wait();
    }
    if (order == Order::kPushing) all_submitted.set_value();
    for (size_t i = 0; order != Order::kOneByOne && i < kRequests; ++i) done[i].get_future().wait();
    return outcomes;
  }

  static size_t tight_cache(const Model& model, int chunk) {
    const KvCacheSpec kv = kv_cache_spec(model.spec(), ops::KvType::kF16);
    size_t bytes = 0;
    for (size_t g = 0; g < kv.groups.size(); ++g) {
      const int window = kv.groups[g].window;
      bytes += kv.block_bytes(static_cast<int>(g)) *
               static_cast<size_t>(kv_cache::BlockCache::most_blocks(window, kMaxLen, chunk) + 5);
    }
    return bytes;
  }
};

TEST_P(GoldenLaw, Holds) {
  EngineOptions plain;
  plain.enable_prefix_caching = false;
  const auto first = load(plain);
  ASSERT_NE(first, nullptr);
  const std::vector<Outcome> alone = run(*first, Order::kOneByOne);
  for (const Outcome& o : alone) {
    EXPECT_EQ(o.ids.size(), size_t{kNewTokens});
    EXPECT_EQ(o.logprobs.size(), size_t{2 * kNewTokens});
  }
  EXPECT_EQ(run(*first, Order::kTogether), alone) << "batched";

  const auto cached = load({});
  ASSERT_NE(cached, nullptr);
  EXPECT_EQ(run(*cached, Order::kTogether), alone) << "sharing prefixes";
  EXPECT_EQ(run(*cached, Order::kOneByOne), alone) << "from the cache";
  EXPECT_GT(cached->stats().cached_tokens, 300);

  EngineOptions chunked;
  chunked.max_num_batched_tokens = 16;
  const auto small = load(chunked);
  ASSERT_NE(small, nullptr);
  EXPECT_EQ(run(*small, Order::kTogether), alone) << "in chunks of at most 16";

  EngineOptions tight;
  tight.max_num_batched_tokens = 64;
  tight.enable_prefix_caching = false;
  tight.max_num_seqs = 4;
  tight.kv_cache_memory = tight_cache(first->model(), 64);
  const auto crowded = load(tight);
  ASSERT_NE(crowded, nullptr);
  EXPECT_EQ(run(*crowded, Order::kPushing), alone) << "preempted";
  EXPECT_GT(crowded->stats().preemptions, 0);
}

std::string name_of(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::ranges::replace(name, '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenLaw, ::testing::ValuesIn(models()), name_of);

}  // namespace
}  // namespace freshet

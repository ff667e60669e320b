// The engine on a GPU: requests have the same tokens and log-probabilities, bit for bit, one by
// one, together, and in small chunks; steps are recorded as graphs and played meanwhile. Skipped
// without a GPU.
#include <algorithm>
#include <future>

#include <gtest/gtest.h>

#include "backend/cuda/backend.h"
#include "freshet/engine.h"
#include "layers/model.h"

namespace freshet {
namespace {

constexpr int kRequests = 12;
constexpr int kNewTokens = 24;

struct Outcome {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  bool operator==(const Outcome&) const = default;
};

std::vector<Outcome> run(Engine& engine, bool together) {
  std::vector<Outcome> outcomes(kRequests);
  std::vector<std::promise<void>> done(kRequests);
  const int vocab = engine.model().spec().vocab_size;
  for (int i = 0; i < kRequests; ++i) {
    const auto at = static_cast<size_t>(i);
    Request r;
    for (int k = 0; k < 3 + i * 29 % 70; ++k) r.prompt.push_back((k * 37 + i * 11 + 3) % vocab);
    r.params.max_tokens = kNewTokens;
    r.params.ignore_eos = true;
    r.params.logprobs = 1;
    r.params.seed = static_cast<uint64_t>(i);
    r.params.temperature = i % 2 == 0 ? 0.0f : 0.8f;
    r.on_delta = [&outcomes, at](const Delta& d) {
      Outcome& o = outcomes[at];
      o.ids.insert(o.ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) {
        for (const TokenLogprob& t : list) o.logprobs.push_back(t.logprob);
      }
    };
    r.on_done = [&done, at](const Usage&) { done[at].set_value(); };
    const auto id = engine.submit(std::move(r));
    EXPECT_TRUE(id.ok()) << id.status().message();
    if (!together) done[at].get_future().wait();
  }
  for (size_t i = 0; together && i < kRequests; ++i) done[i].get_future().wait();
  return outcomes;
}

class CudaEngine : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto device = cuda::open(std::string("auto"));
    ASSERT_TRUE(device.ok()) << device.status().message();
    if (*device == nullptr) GTEST_SKIP() << "no GPU here";
  }
  static std::unique_ptr<Engine> load(int step_tokens) {
    const std::string param = GetParam();  // of a model, and a type of its cache
    const size_t plus = param.find('+');
    EngineOptions o;
    o.model = std::string(FRESHET_SOURCE_DIR) + "/tests/data/golden/" + param.substr(0, plus);
    if (plus != param.npos) o.kv_cache_dtype = param.substr(plus + 1);
    o.device = "cuda";
    o.threads = 2;
    o.max_model_len = 128;
    o.max_num_seqs = 16;
    o.kv_cache_memory = size_t{64} << 20;
    o.max_num_batched_tokens = step_tokens;
    o.enable_prefix_caching = step_tokens > 100;
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
};

TEST_P(CudaEngine, TheBatchChangesNoBit) {
  std::vector<Outcome> alone;
  {
    const auto engine = load(512);
    ASSERT_NE(engine, nullptr);
    alone = run(*engine, false);
    for (const Outcome& o : alone) EXPECT_EQ(o.ids.size(), size_t{kNewTokens});
    EXPECT_EQ(run(*engine, true), alone) << "together";
  }
  const auto engine = load(16);
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(run(*engine, true), alone) << "in steps of 16 tokens";
}

INSTANTIATE_TEST_SUITE_P(Models, CudaEngine,
                         ::testing::Values("llama", "gemma2", "gpt-oss", "deepseek-v3", "opt",
                                           "qwen3+fp8", "gpt-oss+fp8"),
                         [](const auto& i) {
                           std::string name = i.param;
                           std::ranges::replace(name, '-', '_');
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

}  // namespace
}  // namespace freshet

// Evictions of keys keep the law of the batch: with every policy, a request's tokens and
// log-probabilities are the same, bit for bit, alone, in a batch, in chunks, with a cached prefix
// and after preemption. And they act: other keys give other numbers, and fewer blocks are held.
#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <sstream>

#include <gtest/gtest.h>
#include <unistd.h>

#include "backend/cuda/backend.h"
#include "base/json.h"
#include "freshet/engine.h"
#include "kv_cache/block_cache.h"
#include "layers/model.h"

namespace freshet {
namespace {

constexpr int kEvicting = 12;  // requests
constexpr int kLongest = 128;  // positions of the golden models

struct Policy {
  const char* model;
  const char* json;
  const char* type = "auto";  // of keys and values
  const char* device = "cpu";
};
constexpr Policy kPolicies[] = {
    {"llama", R"({"policy": "streaming", "budget": 36, "sinks": 4, "interval": 8})"},
    {"llama", R"({"policy": "snapkv", "budget": 30, "window": 8, "kernel": 3})"},
    {"llama", R"({"policy": "snapkv", "budget": 30, "window": 8, "interval": 8})"},
    {"llama", R"({"policy": "pyramidkv", "budget": 30, "window": 8, "beta": 4, "interval": 8})"},
    {"llama", R"({"policy": "pyramidkv", "budget": 30, "window": 8, "decay": 0.7})"},
    {"llama", R"({"policy": "h2o", "budget": 30, "interval": 8})"},
    {"llama", R"({"policy": "tova", "budget": 44, "interval": 8})"},
    {"llama", R"({"policy": "rkv", "budget": 30, "interval": 8})"},
    {"llama", R"({"policy": "keydiff", "budget": 30, "interval": 8})"},
    {"gemma2", R"({"policy": "h2o", "budget": 30, "interval": 8})"},
    {"gpt-oss", R"({"policy": "snapkv", "budget": 30, "window": 8, "interval": 8})"},
    {"deepseek-v3", R"({"policy": "rkv", "budget": 30, "interval": 8})"},
    {"llama", R"({"policy": "snapkv", "budget": 30, "window": 8, "interval": 8})", "int4"},
    {"gemma2", R"({"policy": "h2o", "budget": 30, "interval": 8})", "int4"},
    {"gpt-oss", R"({"policy": "keydiff", "budget": 30, "interval": 8})", "k8v4"},
    {"llama", R"({"policy": "streaming", "budget": 36, "interval": 8})", "k8v4"},
    // In F16 so small heads take as many bytes as two in 4 bits.
    {"llama", R"({"policy": "mikv", "budget": 30, "interval": 8})", "f32"},
    {"gemma2", R"({"policy": "mikv", "budget": 20, "interval": 8})", "f32"},
    {"gpt-oss", R"({"policy": "mikv", "budget": 30, "interval": 8, "sinks": 2})", "f32"},
};

// On a GPU, if there is one.
constexpr Policy kOnGpu[] = {
    {"llama", R"({"policy": "streaming", "budget": 36, "interval": 8})", "auto", "cuda"},
    {"llama", R"({"policy": "snapkv", "budget": 30, "window": 8, "interval": 8})", "auto", "cuda"},
    {"llama", R"({"policy": "pyramidkv", "budget": 30, "window": 8, "beta": 4, "interval": 8})",
     "bf16", "cuda"},
    {"llama", R"({"policy": "h2o", "budget": 30, "interval": 8})", "int8", "cuda"},
    {"llama", R"({"policy": "tova", "budget": 44, "interval": 8})", "k8v4", "cuda"},
    {"llama", R"({"policy": "rkv", "budget": 30, "interval": 8})", "int4", "cuda"},
    {"llama", R"({"policy": "keydiff", "budget": 30, "interval": 8})", "fp8", "cuda"},
    {"gemma2", R"({"policy": "h2o", "budget": 30, "interval": 8})", "auto", "cuda"},
    {"gpt-oss", R"({"policy": "snapkv", "budget": 30, "window": 8, "interval": 8})", "auto",
     "cuda"},
    {"deepseek-v3", R"({"policy": "h2o", "budget": 30, "interval": 8})", "auto", "cuda"},
};

struct Bits {
  std::vector<int32_t> ids;
  std::vector<uint32_t> logprobs;
  bool operator==(const Bits&) const = default;
};

Request evicting_request(int which, int vocab) {
  Request r;
  const int length = 20 + which * 29 % 60;
  for (int i = 0; i < length; ++i) {
    r.prompt.push_back((i * 37 + (i < 18 ? 0 : which * 11) + 3) % vocab);
  }
  r.params.max_tokens = 40;
  r.params.ignore_eos = true;
  r.params.logprobs = 1;
  r.params.seed = static_cast<uint64_t>(which);
  r.params.temperature = which % 2 == 0 ? 0.0f : 0.8f;
  r.params.n = which == 5 ? 3 : 1;
  return r;
}

class Evictions : public ::testing::TestWithParam<Policy> {
 protected:
  void SetUp() override {
    if (!on_gpu()) return;
    const auto opened = cuda::open(std::string("auto"));
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    if (*opened == nullptr) GTEST_SKIP() << "no GPU here";
  }
  static bool on_gpu() { return std::string_view(GetParam().device) == "cuda"; }

  static std::unique_ptr<Engine> open(EngineOptions o) {
    o.device = GetParam().device;
    // Several engines share a GPU.
    if (on_gpu() && o.kv_cache_memory == 0) o.kv_cache_memory = size_t{64} << 20;
    o.model = std::string(FRESHET_UNPACKED_DATA) + "/golden/" + GetParam().model;
    o.kv_cache_dtype = GetParam().type;
    o.threads = 2;
    o.max_model_len = kLongest;
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }

  static std::vector<Bits> run(Engine& engine, bool together, int* preempted = nullptr) {
    std::vector<Bits> all(kEvicting * 3);
    std::vector<std::promise<void>> done(kEvicting);
    std::promise<void> submitted;
    const std::shared_future<void> everyone = submitted.get_future().share();
    for (int i = 0; i < kEvicting; ++i) {
      Request r = evicting_request(i, engine.model().spec().vocab_size);
      r.priority = preempted != nullptr && i < kEvicting / 2 ? 1 : 0;
      r.on_delta = [&all, i, together, everyone](const Delta& d) {
        Bits& bits = all[static_cast<size_t>(i * 3 + d.index)];
        if (together && bits.ids.empty()) everyone.wait();
        bits.ids.insert(bits.ids.end(), d.ids.begin(), d.ids.end());
        for (const auto& list : d.logprobs) {
          for (const TokenLogprob& t : list)
            bits.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
        }
      };
      r.on_done = [&, i](const Usage& u) {
        if (preempted != nullptr) *preempted += u.preemptions;
        done[static_cast<size_t>(i)].set_value();
      };
      const auto id = engine.submit(std::move(r));
      EXPECT_TRUE(id.ok()) << id.status().message();
      if (!together) done[static_cast<size_t>(i)].get_future().wait();
    }
    submitted.set_value();
    for (int i = 0; together && i < kEvicting; ++i)
      done[static_cast<size_t>(i)].get_future().wait();
    return all;
  }

  static void expect_equal(const std::vector<Bits>& run, const std::vector<Bits>& alone,
                           const char* how) {
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(run[i].ids, alone[i].ids) << how << ": request " << i / 3;
      EXPECT_EQ(run[i].logprobs, alone[i].logprobs) << how << ": request " << i / 3;
    }
  }

  // Drafts of a model that keeps all keys, so that some of them are wrong.
  static EngineOptions speculating() {
    EngineOptions o = evicting();
    o.speculative_config = R"({"method": "draft_model", "num_speculative_tokens": 5, "model": ")" +
                           std::string(FRESHET_UNPACKED_DATA) + "/golden/" + GetParam().model +
                           "\"}";
    return o;
  }

  static EngineOptions evicting() {
    EngineOptions o;
    o.kv_eviction = GetParam().json;
    return o;
  }

  // With room for the longest sequence alone, so that requests are preempted.
  static EngineOptions crowding(const Engine& engine) {
    const std::string_view type = GetParam().type;
    const KvCacheSpec kv =
        kv_cache_spec(engine.model().spec(), *ops::kv_type_by_name(type == "auto" ? "f16" : type));
    EngineOptions o = evicting();
    o.max_num_batched_tokens = 64;
    for (size_t g = 0; g < kv.groups.size(); ++g) {
      const int32_t blocks = kv_cache::BlockCache::most_blocks(kv.groups[g].window, kLongest, 64);
      o.kv_cache_memory += kv.block_bytes(static_cast<int>(g)) * static_cast<size_t>(blocks);
    }
    return o;
  }
};

TEST_P(Evictions, KeepTheLaw) {
  EngineOptions plain = evicting();
  plain.enable_prefix_caching = false;
  const auto first = open(plain);
  ASSERT_NE(first, nullptr);
  const std::vector<Bits> alone = run(*first, false);
  EXPECT_GT(first->stats().kv_evictions, kEvicting / 2);
  expect_equal(run(*first, true), alone, "batched");

  const auto cached = open(evicting());
  ASSERT_NE(cached, nullptr);
  expect_equal(run(*cached, true), alone, "sharing prefixes");
  const int64_t shared = cached->stats().cached_tokens;
  expect_equal(run(*cached, true), alone, "from the cache");
  EXPECT_GT(cached->stats().cached_tokens, shared);

  EngineOptions narrow = evicting();
  narrow.max_num_batched_tokens = 16;
  const auto chunked = open(narrow);
  ASSERT_NE(chunked, nullptr);
  expect_equal(run(*chunked, true), alone, "in steps of 16 tokens");

  EngineOptions tight = crowding(*first);
  const auto crowded = open(tight);
  ASSERT_NE(crowded, nullptr);
  int preempted = 0;
  expect_equal(run(*crowded, true, &preempted), alone, "preempted");
  EXPECT_GE(preempted, 1);

  tight.kv_offloading_bytes = size_t{1} << 24;
  const auto swapped = open(tight);
  ASSERT_NE(swapped, nullptr);
  expect_equal(run(*swapped, true, &preempted), alone, "preempted, with a host tier");
  expect_equal(run(*swapped, true, &preempted), alone, "from the host tier");
}

TEST_P(Evictions, KeepTheLawWithDrafts) {
  EngineOptions plain = evicting();
  plain.enable_prefix_caching = false;
  const auto first = open(plain);
  ASSERT_NE(first, nullptr);
  const std::vector<Bits> alone = run(*first, false);

  const auto drafting = open(speculating());
  ASSERT_NE(drafting, nullptr);
  expect_equal(run(*drafting, true), alone, "with drafts, batched");
  const EngineStats stats = drafting->stats();
  EXPECT_GT(stats.kv_evictions, kEvicting / 2);
  EXPECT_GT(stats.speculation.accepted_tokens, 100);
  EXPECT_GT(stats.speculation.draft_tokens - stats.speculation.accepted_tokens, 5);

  EngineOptions tight = crowding(*first);
  tight.speculative_config =
      R"({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1})";
  const auto crowded = open(tight);
  ASSERT_NE(crowded, nullptr);
  int preempted = 0;
  expect_equal(run(*crowded, true, &preempted), alone, "with drafts, preempted");
  EXPECT_GE(preempted, 1);
  EXPECT_GT(crowded->stats().speculation.draft_tokens, 20);
}

TEST_P(Evictions, Act) {
  EngineOptions o;
  o.enable_prefix_caching = false;
  const auto keeps = open(o);
  o.kv_eviction = GetParam().json;
  const auto evicts = open(o);
  ASSERT_TRUE(keeps != nullptr && evicts != nullptr);
  const auto longest = [](Engine& engine, double& usage) {
    Request r = evicting_request(2, engine.model().spec().vocab_size);
    Bits bits;
    std::promise<void> done;
    r.on_delta = [&](const Delta& d) {
      bits.ids.insert(bits.ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) {
        for (const TokenLogprob& t : list)
          bits.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
      }
      usage = engine.stats().kv_cache_usage * static_cast<double>(engine.cache_info().blocks);
    };
    r.on_done = [&](const Usage&) { done.set_value(); };
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    done.get_future().wait();
    return bits;
  };
  double all = 0.0, some = 0.0;
  const Bits kept = longest(*keeps, all), left = longest(*evicts, some);
  if (std::string_view(GetParam().json).find("streaming") == std::string_view::npos) {
    EXPECT_EQ(kept.logprobs[0], left.logprobs[0]) << "the first token reads the whole prompt";
  }
  EXPECT_NE(kept.logprobs, left.logprobs);
  EXPECT_LT(some, all);
}

// The golden Llama with positions up to 200,000, for as long as this lives.
class LongLlama {
 public:
  LongLlama()
      : folder_(std::filesystem::temp_directory_path() /
                ("freshet-streaming-" + std::to_string(::getpid()))) {
    const std::string golden = FRESHET_UNPACKED_DATA "/golden/llama";
    std::filesystem::copy(golden, folder_,
                          std::filesystem::copy_options::overwrite_existing |
                              std::filesystem::copy_options::recursive);
    std::ifstream in(golden + "/config.json");
    std::stringstream text;
    text << in.rdbuf();
    auto config = json::parse(text.str());
    EXPECT_TRUE(config.ok());
    config->as_object()["max_position_embeddings"] = 200'000;
    std::ofstream(folder_ / "config.json") << json::write(*config);
  }
  ~LongLlama() { std::filesystem::remove_all(folder_); }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  const std::filesystem::path folder_;
};

// A drafter keeps all keys, so it must have room for them although the model evicts.
TEST(StreamingEviction, DraftsToTheEnd) {
  const LongLlama llama;
  EngineOptions o;
  o.model = llama.folder();
  o.threads = 1;
  o.max_num_seqs = 1;
  o.max_num_batched_tokens = 64;
  o.max_model_len = 3000;
  o.kv_eviction = R"({"policy": "streaming", "budget": 64, "interval": 16})";
  o.speculative_config = R"({"method": "draft_model", "num_speculative_tokens": 2, "model": ")" +
                         llama.folder().string() + "\"}";
  auto engine = Engine::load(o);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  Request r = evicting_request(0, (*engine)->model().spec().vocab_size);
  r.params.max_tokens = 2900;
  int generated = 0;
  int64_t drafted = 0;  // in the first half
  std::promise<void> done;
  r.on_delta = [&](const Delta& d) {
    generated += static_cast<int>(d.ids.size());
    if (generated < 1450) drafted = (*engine)->stats().speculation.draft_tokens;
  };
  r.on_done = [&](const Usage&) { done.set_value(); };
  ASSERT_TRUE((*engine)->submit(std::move(r)).ok());
  done.get_future().wait();
  EXPECT_EQ(generated, 2900);
  EXPECT_GT(drafted, 500);
  EXPECT_GT((*engine)->stats().speculation.draft_tokens, drafted * 3 / 2);
}

// A cache of 24 blocks serves a sequence of any length.
TEST(StreamingEviction, GeneratesInConstantMemory) {
  const LongLlama llama;
  constexpr int kStreamed = 100'000;

  EngineOptions o;
  o.model = llama.folder();
  o.threads = 1;
  o.max_num_seqs = 2;
  o.max_num_batched_tokens = 64;
  o.max_model_len = 150'000;
  o.kv_eviction = R"({"policy": "streaming", "budget": 256, "interval": 64})";
  o.kv_cache_memory = size_t{1} << 17;
  auto engine = Engine::load(o);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  const int64_t blocks = (*engine)->cache_info().blocks;
  EXPECT_LT(blocks, 150'000 / 16 / 10);
  Request r = evicting_request(0, (*engine)->model().spec().vocab_size);
  r.params.max_tokens = kStreamed;
  r.params.temperature = 1.0f;
  double most = 0.0;
  int generated = 0;
  std::promise<Usage> done;
  r.on_delta = [&](const Delta& d) {
    generated += static_cast<int>(d.ids.size());
    most = std::max(most, (*engine)->stats().kv_cache_usage);
  };
  r.on_done = [&](const Usage& u) { done.set_value(u); };
  ASSERT_TRUE((*engine)->submit(std::move(r)).ok());
  EXPECT_EQ(done.get_future().get().preemptions, 0);
  EXPECT_EQ(generated, kStreamed);
  EXPECT_LE(most * static_cast<double>(blocks), 256.0 / 16 + 64.0 / 16 + 16 + 2);

  Request whole = evicting_request(0, (*engine)->model().spec().vocab_size);
  whole.params.max_tokens = 100'000;
  whole.kv_eviction = R"({"policy": "none"})";
  std::promise<void> over;
  std::string error;
  whole.on_delta = [&](const Delta& d) { error = d.error.message(); };
  whole.on_done = [&](const Usage&) { over.set_value(); };
  ASSERT_TRUE((*engine)->submit(std::move(whole)).ok());
  over.get_future().wait();
  EXPECT_NE(error.find("cache blocks with this kv_eviction"), std::string::npos) << error;
}

std::string policy_name(const ::testing::TestParamInfo<Policy>& info) {
  std::string name = info.param.model + std::string("_") + std::to_string(info.index);
  std::ranges::replace(name, '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Policies, Evictions, ::testing::ValuesIn(kPolicies), policy_name);
INSTANTIATE_TEST_SUITE_P(Cuda, Evictions, ::testing::ValuesIn(kOnGpu), policy_name);

}  // namespace
}  // namespace freshet

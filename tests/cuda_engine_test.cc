// The engine on a GPU: requests have bit-identical tokens and log-probabilities one by one,
// together, and in small chunks; meanwhile steps are captured as CUDA graphs and replayed. Skipped
// without a GPU.
#include <algorithm>
#include <future>

#include <gtest/gtest.h>

#include "backend/cuda/backend.h"
#include "freshet/engine.h"
#include "layers/model.h"
#include "models/load_test.h"
#include "tensor/dtype.h"

namespace freshet {
namespace {

constexpr int kRequests = 12;
constexpr int kNewTokens = 24;

struct Outcome {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  bool operator==(const Outcome&) const = default;
};

std::vector<int32_t> prompt_of(int i, int vocab) {
  std::vector<int32_t> prompt;
  for (int k = 0; k < 3 + i * 29 % 70; ++k) prompt.push_back((k * 37 + i * 11 + 3) % vocab);
  return prompt;
}

std::vector<Outcome> run(Engine& engine, bool together) {
  std::vector<Outcome> outcomes(kRequests);
  std::vector<std::promise<void>> done(kRequests);
  const int vocab = engine.model().spec().vocab_size;
  for (int i = 0; i < kRequests; ++i) {
    const auto at = static_cast<size_t>(i);
    Request r;
    r.prompt = prompt_of(i, vocab);
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

std::unique_ptr<Engine> load_engine(EngineOptions o, int step_tokens) {
  o.device = "cuda";
  o.threads = 2;
  o.max_model_len = 128;
  o.max_num_seqs = 16;
  if (o.kv_cache_memory == 0) o.kv_cache_memory = size_t{64} << 20;
  o.max_num_batched_tokens = step_tokens;
  o.enable_prefix_caching = step_tokens > 100;
  auto engine = Engine::load(o);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(*engine) : nullptr;
}

class CudaEngine : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto device = cuda::open(std::string("auto"));
    ASSERT_TRUE(device.ok()) << device.status().message();
    if (*device == nullptr) GTEST_SKIP() << "no GPU here";
  }
  static std::unique_ptr<Engine> load(int step_tokens, EngineOptions o = {}) {
    const std::string param = GetParam();  // a model and a KV cache type
    const size_t plus = param.find('+');
    const std::string model = param.substr(0, plus);
    o.model = golden(model == "int8" ? "../golden-int8/llama" : model);
    if (model.starts_with("seeded/")) o.model = std::string(FRESHET_UNPACKED_DATA) + "/" + model;
    if (plus != param.npos) o.kv_cache_dtype = param.substr(plus + 1);
    return load_engine(o, step_tokens);
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
                                           "qwen3+fp8", "gpt-oss+fp8", "qwen3+bf16", "qwen3+int8",
                                           "gpt-oss+int8", "int8", "llama+int4", "qwen3+k8v4",
                                           "gemma2+int4", "seeded/lfm2", "seeded/mamba",
                                           "seeded/mamba2", "seeded/jamba", "seeded/falcon-h1",
                                           "seeded/granitemoehybrid", "seeded/qwen3-next+int4",
                                           "seeded/minimax", "seeded/llama4-text"),
                         [](const auto& i) {
                           std::string name = i.param;
                           std::ranges::replace(name, '/', '_');
                           std::ranges::replace(name, '-', '_');
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

// Drafts of different lengths: steps of as many tokens and sequences differ in how many each has.
class CudaNgrams : public CudaEngine {};

TEST_P(CudaNgrams, ChangeNoBit) {
  EngineOptions drafting;
  const auto plain = load(512);
  ASSERT_NE(plain, nullptr);
  const std::vector<Outcome> alone = run(*plain, false);
  drafting.speculative_config =
      R"({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1})";
  const auto engine = load(512, drafting);
  ASSERT_NE(engine, nullptr);
  for (int turn = 0; turn < 4; ++turn) EXPECT_EQ(run(*engine, true), alone) << turn;
  EXPECT_GT(engine->stats().speculation.draft_tokens, 100);
}

INSTANTIATE_TEST_SUITE_P(Models, CudaNgrams,
                         ::testing::Values("llama", "gemma2", "gpt-oss", "deepseek-v3"),
                         [](const auto& i) {
                           std::string name = i.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// Blocks of a device in the tiers: what comes back from host memory and from a disk gives the same
// bits, also while other requests run and lose their blocks.
class CudaTiers : public CudaEngine {
 protected:
  void SetUp() override {
    CudaEngine::SetUp();
    folder_ = std::filesystem::temp_directory_path() /
              fmt::format("freshet-tiers-{}", ::testing::UnitTest::GetInstance()->random_seed());
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

TEST_P(CudaTiers, GiveBackTheSameBits) {
  std::vector<Outcome> alone;
  EngineOptions host;
  {
    const auto engine = load(512);
    ASSERT_NE(engine, nullptr);
    alone = run(*engine, false);
    // Less than all requests need: the device loses blocks that the tier keeps.
    const CacheInfo cache = engine->cache_info();
    host.kv_cache_memory = cache.bytes / static_cast<size_t>(cache.tokens) * 400;
  }
  host.kv_offloading_bytes = size_t{64} << 20;
  {
    const auto engine = load(512, host);
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(run(*engine, true), alone) << "with a host tier";
    for (int turn = 0; turn < 3; ++turn)
      EXPECT_EQ(run(*engine, true), alone) << "from the host tier";
    EXPECT_GT(engine->stats().tiers.stores, 0);
    EXPECT_GT(engine->stats().tiers.loads, 0);
    EXPECT_EQ(engine->stats().tiers.load_failures, 0);
    const auto saved = engine->save_prefix({1, 2, 3}, "", (folder_ / "slot").string());
    EXPECT_EQ(saved.status().code(), StatusCode::kUnsupported);
  }
  EngineOptions disk;
  disk.kv_cache_dir = folder_.string();
  for (const bool warm : {false, true}) {
    const auto engine = load(512, disk);
    ASSERT_NE(engine, nullptr);
    EXPECT_EQ(run(*engine, true), alone) << (warm ? "from a disk" : "with a disk");
    EXPECT_EQ(engine->stats().tiers.loads > 0, warm);
    EXPECT_EQ(engine->stats().tiers.load_failures, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaTiers,
                         ::testing::Values("llama", "gemma2+int8", "llama+int4", "gpt-oss+fp8",
                                           "deepseek-v3"),
                         [](const auto& i) {
                           std::string name = i.param;
                           std::ranges::replace(name, '-', '_');
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

// A checkpoint of INT4 groups (compressed-tensors, pack-quantized) and one with the same numbers in
// BF16, which represents them exactly: the GPU multiplies both with the same result.
void to_int4(Tensors& tensors, json::Object& config, int64_t group, bool packed) {
  constexpr int64_t kHidden = 128, kFf = 384;
  config["hidden_size"] = json::Value(kHidden);
  config["intermediate_size"] = json::Value(kFf);
  config["head_dim"] = json::Value(32);
  if (packed) {
    config["quantization_config"] = *json::parse(
        fmt::format(R"({{"quant_method": "compressed-tensors", "format": "pack-quantized",
                         "ignore": ["lm_head"], "group_size": {}}})",
                    group));
  }
  uint32_t state = 7;
  const auto random = [&](uint32_t below) {
    state = state * 1664525 + 1013904223;
    return (state >> 16) % below;
  };
  const auto put = [&](const std::string& stem, int64_t rows, int64_t cols, bool as_int4) {
    const int64_t groups = cols / group;
    std::vector<uint32_t> q(static_cast<size_t>(rows * cols / 8));
    std::vector<uint32_t> zero(static_cast<size_t>(rows / 8 * groups));
    for (uint32_t& word : q) word = random(1 << 16) | random(1 << 16) << 16;
    for (uint32_t& word : zero) word = random(1 << 16) | random(1 << 16) << 16;
    Tensor plain{"BF16", {rows, cols}, {}}, scales{"BF16", {rows, groups}, {}};
    std::vector<float> d;
    for (int64_t i = 0; i < rows * groups; ++i) {
      d.push_back(static_cast<float>(4 + random(4)) * 0x1p-9f);  // times 15: at most 8 bits
      append(scales.bytes, f32_to_bf16(d.back()));
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const int64_t g = c / group;
        const uint32_t n = q[static_cast<size_t>((r * cols + c) / 8)] >> (c % 8 * 4) & 15;
        const uint32_t z = zero[static_cast<size_t>(r / 8 * groups + g)] >> (r % 8 * 4) & 15;
        const float level = static_cast<float>(n) - static_cast<float>(z);
        append(plain.bytes, f32_to_bf16(d[static_cast<size_t>(r * groups + g)] * level));
      }
    }
    tensors.erase(stem + ".weight");
    if (!as_int4) {
      tensors[stem + ".weight"] = plain;
      return;
    }
    const auto words = [](int64_t down, int64_t across, const std::vector<uint32_t>& of) {
      return Tensor{"I32",
                    {down, across},
                    std::string(reinterpret_cast<const char*>(of.data()), of.size() * 4)};
    };
    tensors[stem + ".weight_packed"] = words(rows, cols / 8, q);
    tensors[stem + ".weight_scale"] = scales;
    tensors[stem + ".weight_zero_point"] = words(rows / 8, groups, zero);
    tensors[stem + ".weight_shape"] = {"I64", {2}, std::string(16, '\0')};
  };
  for (auto& [name, tensor] : tensors) {
    if (!name.ends_with("norm.weight")) continue;
    tensor = {"F32", {kHidden}, {}};
    for (int64_t i = 0; i < kHidden; ++i) append(tensor.bytes, 1.0f);
  }
  put("model.embed_tokens", 288, kHidden, false);
  put("lm_head", 288, kHidden, false);
  for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
    for (const auto& [name, rows, cols] : {std::tuple{"self_attn.q_proj", int64_t{128}, kHidden},
                                           {"self_attn.k_proj", 64, kHidden},
                                           {"self_attn.v_proj", 64, kHidden},
                                           {"self_attn.o_proj", kHidden, 128},
                                           {"mlp.gate_proj", kFf, kHidden},
                                           {"mlp.up_proj", kFf, kHidden},
                                           {"mlp.down_proj", kHidden, kFf}}) {
      put(std::string(layer) + name, rows, cols, packed);
    }
  }
}

TEST(CudaInt4, ACheckpointGivesTheBitsOfItsNumbers) {
  const auto device = cuda::open(std::string("auto"));
  ASSERT_TRUE(device.ok()) << device.status().message();
  if (*device == nullptr) GTEST_SKIP() << "no GPU here";
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      fmt::format("freshet-int4-{}", ::testing::UnitTest::GetInstance()->random_seed());
  for (const int64_t group : {128, 32}) {
    std::vector<Outcome> outcomes[2];
    for (const bool packed : {false, true}) {
      std::filesystem::create_directories(folder);
      Tensors tensors = read_tensors("llama");
      auto config = json::parse_file(golden("llama") + "/config.json");
      to_int4(tensors, config->as_object(), group, packed);
      write_tensors((folder / "model.safetensors").string(), tensors);
      std::ofstream(folder / "config.json") << json::write(*config);
      EngineOptions o;
      o.model = folder.string();
      const auto engine = load_engine(o, 512);
      ASSERT_NE(engine, nullptr);
      outcomes[packed ? 1 : 0] = run(*engine, false);
      EXPECT_EQ(run(*engine, true), outcomes[packed ? 1 : 0]) << "together, groups of " << group;
      std::filesystem::remove_all(folder);
    }
    EXPECT_EQ(outcomes[0], outcomes[1]) << "groups of " << group;
  }
}

}  // namespace
}  // namespace freshet

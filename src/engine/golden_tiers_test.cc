// Prefixes that come from a disk: on golden models, tokens and log-probabilities are the same to
// the bit as those computed, for each type of the cache and kind of attention.
#include <bit>
#include <filesystem>
#include <future>
#include <memory>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "freshet/engine.h"

namespace freshet {
namespace {

namespace fs = std::filesystem;

struct TierReply {
  std::vector<int32_t> ids;
  std::vector<uint32_t> logprobs;  // bits
  int cached = 0;
};

class GoldenTiers : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("freshet_golden_tiers_{}", ::getpid());
    fs::remove_all(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::unique_ptr<Engine> load(bool tiers, const std::string& type) {
    EngineOptions o;
    const size_t plus = GetParam().find('+');
    o.model = GetParam().starts_with("seeded/")
                  ? FRESHET_UNPACKED_DATA "/" + GetParam().substr(0, plus)
                  : FRESHET_UNPACKED_DATA "/golden/" + GetParam().substr(0, plus);
    o.kv_cache_dtype = type;
    o.threads = 2;
    o.max_model_len = 128;
    o.max_prefill_chunk = 32;
    if (tiers) o.kv_cache_dir = (folder_ / "kv").string();
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
  static TierReply ask(Engine& engine, int which) {
    Request r;
    for (int i = 0; i < 70 + which; ++i) r.prompt.push_back(3 + (i * 7 + which) % 29);
    r.params.temperature = which == 0 ? 0.0f : 0.8f;
    r.params.seed = 7;
    r.params.max_tokens = 12;
    r.params.ignore_eos = true;
    r.params.logprobs = 0;
    TierReply reply;
    std::promise<void> done;
    r.on_delta = [&](const Delta& d) {
      EXPECT_TRUE(d.error.ok()) << d.error.message();
      reply.ids.insert(reply.ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& token : d.logprobs)
        reply.logprobs.push_back(std::bit_cast<uint32_t>(token.front().logprob));
    };
    r.on_done = [&](const Usage& usage) {
      reply.cached = usage.cached_tokens;
      done.set_value();
    };
    const auto sent = engine.submit(std::move(r));
    EXPECT_TRUE(sent.ok()) << sent.status().message();
    if (sent.ok()) done.get_future().wait();
    return reply;
  }
  std::string type() const { return GetParam().substr(GetParam().find('+') + 1); }
  fs::path folder_;
};

TEST_P(GoldenTiers, RestoredIsColdToTheBit) {
  std::vector<TierReply> cold;
  {
    const auto plain = load(false, type());
    for (int i = 0; i < 3; ++i) cold.push_back(ask(*plain, i));
  }
  {
    const auto first = load(true, type());
    for (int i = 0; i < 3; ++i) {
      const TierReply reply = ask(*first, i);
      EXPECT_EQ(reply.logprobs, cold[static_cast<size_t>(i)].logprobs);
    }
  }
  const auto second = load(true, type());
  for (int i = 0; i < 3; ++i) {
    const TierReply warm = ask(*second, i);
    EXPECT_EQ(warm.ids, cold[static_cast<size_t>(i)].ids) << i;
    EXPECT_EQ(warm.logprobs, cold[static_cast<size_t>(i)].logprobs) << i;
    EXPECT_GE(warm.cached, 64) << i;
  }
  EXPECT_EQ(second->stats().tiers.load_failures, 0);
  // A session file gives the same.
  const std::vector<int32_t> prompt = [] {
    std::vector<int32_t> ids;
    for (int i = 0; i < 70; ++i) ids.push_back(3 + i * 7 % 29);
    return ids;
  }();
  const std::string path = (folder_ / "slot").string();
  const auto saved = second->save_prefix(prompt, "", path);
  ASSERT_TRUE(saved.ok()) << saved.status().message();
  const auto third = load(false, type());
  ASSERT_TRUE(third->restore_prefix(path, "").ok());
  const TierReply warm = ask(*third, 0);
  EXPECT_EQ(warm.logprobs, cold[0].logprobs);
  EXPECT_EQ(warm.cached, 64);
  const auto other = load(false, type() == "f16" ? "bf16" : "f16");
  EXPECT_FALSE(other->restore_prefix(path, "").ok());
}

// Tokens alone do not tell what their blocks hold, or there are no blocks to keep.
TEST(Tiers, ModelsWithStatesOrEncodersRefuseThem) {
  const fs::path folder =
      fs::temp_directory_path() / fmt::format("freshet_refused_tiers_{}", ::getpid());
  const std::string slot = (folder / "slot").string();
  for (const std::string name : {"lfm2", "mamba", "t5", "bert"}) {
    SCOPED_TRACE(name);
    EngineOptions o;
    o.model = FRESHET_UNPACKED_DATA "/seeded/" + name;
    o.threads = 2;
    const auto plain = Engine::load(o);
    ASSERT_TRUE(plain.ok()) << plain.status().message();
    EXPECT_EQ((*plain)->save_prefix({1, 2, 3}, "", slot).status().code(), StatusCode::kUnsupported);
    EXPECT_EQ((*plain)->restore_prefix(slot, "").status().code(), StatusCode::kUnsupported);
    EngineOptions host = o;
    host.kv_offloading_bytes = size_t{1} << 24;
    EngineOptions disk = o;
    disk.kv_cache_dir = folder.string();
    for (const EngineOptions& with : {host, disk}) {
      const auto refused = Engine::load(with);
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
      EXPECT_NE(refused.status().message().find("--kv-cache-dir"), std::string::npos);
      EXPECT_EQ(refused.status().message().find('\n'), std::string::npos);
    }
    EXPECT_FALSE(fs::exists(folder));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenTiers,
                         ::testing::Values("llama+f16", "llama+int8", "llama+fp8", "gemma2+f16",
                                           "llama+int4", "llama+k8v4", "gemma2+int8",
                                           "deepseek-v3+f16", "gpt-oss+int8",
                                           "seeded/llama4-text+f16"),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           for (char& c : name) {
                             if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace freshet

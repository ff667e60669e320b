#include "engine/plan.h"

#include <gtest/gtest.h>

#include "engine/memory.h"
#include "kv_cache/block_cache.h"

namespace freshet::engine {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// Like a 1B model: 16 layers, 8 heads of 64, F16: 32 KiB of cache a token.
PlanRequest request_of(std::vector<KvGroup> groups = {}) {
  PlanRequest r;
  r.weights = 1000 * kMiB;
  r.model_context = 131072;
  r.vocab_size = 128000;
  if (groups.empty()) groups = {{0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}}};
  size_t layers = 0;
  for (const KvGroup& g : groups) layers += g.layers.size();
  ops::KvShape shape;
  shape.kv_heads = 8;
  shape.key_dim = 64;
  shape.value_dim = 64;
  r.kv.layers.assign(layers, {shape});
  r.kv.groups = std::move(groups);
  r.available = 16384 * kMiB;
  r.workspace = [](int64_t tokens, int64_t, int64_t) {
    return static_cast<size_t>(tokens) * 100 * 1024;
  };
  return r;
}

TEST(Plan, FitsTheLongestSequenceInAQuarterOfWhatIsLeft) {
  const auto plan = make_plan(request_of());
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_LE(plan->kv_bytes(), 4096 * kMiB);
  EXPECT_GT(plan->kv_bytes(), 3300 * kMiB);
  EXPECT_LT(plan->max_model_len, 131072);
  EXPECT_GT(plan->max_model_len, 100000);
  EXPECT_GE(plan->blocks[0] * kv_cache::kBlockTokens, plan->max_model_len);
  EXPECT_LE(plan->total(), 16384 * kMiB);
  EXPECT_NE(plan->describe().find("full attention"), std::string::npos);
}

TEST(Plan, TakesNoMoreThanAllSequencesCouldUse) {
  PlanRequest r = request_of();
  r.max_model_len = 256;
  r.max_num_seqs = 2;
  const auto plan = make_plan(r);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->blocks[0], 32);
  EXPECT_EQ(plan->max_num_batched_tokens, 512);
  EXPECT_EQ(plan->max_logit_rows, 16);
}

TEST(Plan, HonoursWhatIsAsked) {
  PlanRequest r = request_of();
  r.max_model_len = 4096;
  r.kv_cache_memory = 512 * kMiB;
  const auto plan = make_plan(r);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->max_model_len, 4096);
  EXPECT_LE(plan->kv_bytes(), 512 * kMiB);
  EXPECT_GT(plan->kv_bytes(), 440 * kMiB);
}

TEST(Plan, BalancesGroups) {
  std::vector<int> local, global;
  for (int i = 0; i < 16; ++i) (i % 4 == 3 ? global : local).push_back(i);
  PlanRequest r = request_of({{0, global}, {1024, local}});
  r.max_model_len = 32768;
  const auto plan = make_plan(r);
  ASSERT_TRUE(plan.ok());
  // Short sequences need as many blocks with a window as without, up to the window.
  EXPECT_GT(plan->blocks[0], 32768 / 16);
  EXPECT_GT(plan->blocks[1], plan->blocks[0] / 4);
  EXPECT_LT(plan->blocks[1], plan->blocks[0]);
  EXPECT_LE(plan->kv_bytes(), 4096 * kMiB);
}

TEST(Plan, RefusesAndSaysWhatWouldFit) {
  PlanRequest r = request_of();
  for (KvLayer& layer : r.kv.layers) layer.shape.type = ops::KvType::kF32;
  r.available = 5000 * kMiB;
  r.max_model_len = 65536;  // 4 GiB in F32
  const auto plan = make_plan(r);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), StatusCode::kResourceExhausted);
  const std::string message = plan.status().message();
  EXPECT_EQ(message.find("needs 5."), 0u) << message;
  EXPECT_NE(message.find("--kv-cache-dtype f16"), std::string::npos) << message;
  for (KvLayer& layer : r.kv.layers) layer.shape.type = ops::KvType::kF16;
  r.available = 3000 * kMiB;
  const std::string half = make_plan(r).status().message();
  EXPECT_NE(half.find("--kv-cache-dtype fp8"), std::string::npos) << half;
  for (KvLayer& layer : r.kv.layers) layer.shape.type = ops::KvType::kF32;
  r.available = 5000 * kMiB;
  const size_t at = message.find("--max-model-len ");
  ASSERT_NE(at, std::string::npos) << message;
  // And it is true.
  r.max_model_len = std::stoi(message.substr(at + 16));
  EXPECT_GT(r.max_model_len, 40000);
  EXPECT_TRUE(make_plan(r).ok());
  r.max_model_len += 512;
  EXPECT_FALSE(make_plan(r).ok());
}

// The number behind `flag`, or 0.
int number_behind(const std::string& message, std::string_view flag) {
  const size_t at = message.rfind(flag);
  return at == std::string::npos ? 0 : std::stoi(message.substr(at + flag.size()));
}

TEST(Plan, NamesTheOptionThatAskedForTooMuch) {
  PlanRequest r = request_of();
  r.max_model_len = 8192;  // 256 MiB
  for (const size_t memory : {size_t{1}, 100 * kMiB, 99999 * kMiB, size_t{1} << 60}) {
    r.kv_cache_memory = memory;
    const auto plan = make_plan(r);
    ASSERT_FALSE(plan.ok());
    const std::string message = plan.status().message();
    const int offered = number_behind(message, "--kv-cache-memory ");
    ASSERT_GT(offered, 0) << message;
    r.kv_cache_memory = static_cast<size_t>(offered) * kMiB;
    EXPECT_TRUE(make_plan(r).ok()) << message;
  }
  r.kv_cache_memory = 0;
  const auto roomy = make_plan(r);
  ASSERT_TRUE(roomy.ok());
  // Where 256.5 MiB fit and 257 do not, these are not offered.
  r.max_model_len = 8192 + 16;
  r.available = (64 + 256) * kMiB + 700 * 1024 + roomy->total() - roomy->kv_bytes();
  EXPECT_TRUE(make_plan(r).ok());
  r.kv_cache_memory = 1;
  EXPECT_EQ(make_plan(r).status().message().find("257M"), std::string::npos);
  r = request_of();
  r.max_num_batched_tokens = 1000000;
  const std::string message = make_plan(r).status().message();
  r.max_num_batched_tokens = number_behind(message, "--max-num-batched-tokens ");
  ASSERT_GT(r.max_num_batched_tokens, 0) << message;
  EXPECT_TRUE(make_plan(r).ok()) << message;
}

TEST(Plan, RefusesWeightsThatDoNotFit) {
  PlanRequest r = request_of();
  r.available = 900 * kMiB;
  const auto plan = make_plan(r);
  ASSERT_FALSE(plan.ok());
  EXPECT_NE(plan.status().message().find("836 MiB free"),
            std::string::npos);  // a little is kept back
}

TEST(Plan, RefusesNonsense) {
  for (const int bad : {-1, 1, 200000}) {
    PlanRequest r = request_of();
    r.max_model_len = bad;
    EXPECT_EQ(make_plan(r).status().code(), StatusCode::kInvalidArgument) << bad;
  }
  PlanRequest r = request_of();
  r.max_num_seqs = -1;
  EXPECT_FALSE(make_plan(r).ok());
}

TEST(Plan, StepsAreShortOnFewCoresAndLargeWhereAGpuHasRoom) {
  PlanRequest r = request_of();
  r.max_num_seqs = r.max_num_batched_tokens = 0;
  r.available = size_t{64} << 30;
  const auto steps = [&] {
    const auto plan = make_plan(r);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    return plan.ok() ? std::pair(plan->max_num_seqs, plan->max_num_batched_tokens)
                     : std::pair(0, 0);
  };
  EXPECT_EQ(steps(), std::pair(256, 2048));
  r.steps = Steps::kShort;
  EXPECT_EQ(steps(), std::pair(256, 512));
  r.steps = Steps::kLarge;
  EXPECT_EQ(steps(), std::pair(1024, 8192));
  r.max_num_seqs = 7;
  EXPECT_EQ(steps(), std::pair(7, 8192));
  r.max_num_seqs = 0;
  r.workspace = [](int64_t tokens, int64_t, int64_t) { return static_cast<size_t>(tokens) << 20; };
  EXPECT_EQ(steps(), std::pair(256, 2048)) << "8 of 64 GiB are more than an eighth of the rest";
  r.max_num_seqs = 900;
  r.max_num_batched_tokens = 5000;
  EXPECT_EQ(steps(), std::pair(900, 5000)) << "as they were asked for";
}

TEST(Memory, ReadsTheSystemsFiles) {
  EXPECT_EQ(mem_available_of("MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable:    750 kB\n"),
            750u * 1024);
  EXPECT_EQ(mem_available_of("nothing"), 0u);
  EXPECT_EQ(left_in_group("1000\n", "600\n", "anon 100\ninactive_file 200\n"), 600u);
  EXPECT_EQ(left_in_group("1000", "1600", ""), 0u);
  EXPECT_EQ(left_in_group("max\n", "600\n", ""), SIZE_MAX);
  EXPECT_EQ(left_in_group("9223372036854771712\n", "600\n", ""),
            SIZE_MAX);  // version 1's "no limit"
  EXPECT_EQ(left_in_group("", "", ""), SIZE_MAX);
  EXPECT_GT(available_memory(), 0u);
}

}  // namespace
}  // namespace freshet::engine

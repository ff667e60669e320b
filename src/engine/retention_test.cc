#include "engine/retention.h"

#include <gtest/gtest.h>

namespace freshet::engine {
namespace {

KvCacheSpec cache_of(std::vector<KvGroup> groups, ops::KvType type = ops::KvType::kF16) {
  KvCacheSpec cache;
  for (const KvGroup& group : groups) {
    for (size_t i = 0; i < group.layers.size(); ++i) {
      KvLayer layer;
      layer.shape = {type, 2, 64, 64};
      cache.layers.push_back(layer);
    }
  }
  cache.groups = std::move(groups);
  return cache;
}

std::string error_of(const KvCacheSpec& cache, const char* json) {
  const auto policy = kv_cache::make_retention(json);
  EXPECT_TRUE(policy.ok()) << policy.status().message();
  return eviction_schedule(**policy, cache).status().message();
}

constexpr const char* kH2oOf32 = R"({"policy": "h2o", "budget": 32})";
constexpr const char* kPyramidOf64 = R"({"policy": "pyramidkv", "budget": 64})";

TEST(EvictionSchedule, LayersWithAWindowOrChunksKeepTheirKeys) {
  const KvCacheSpec cache = cache_of({{0, {0, 3}}, {128, {1}}, {0, {2}, 64}});
  const auto policy = kv_cache::make_retention(kH2oOf32);
  ASSERT_TRUE(policy.ok());
  const auto schedule = eviction_schedule(**policy, cache);
  ASSERT_TRUE(schedule.ok()) << schedule.status().message();
  EXPECT_EQ(schedule->budgets, (std::vector<int32_t>{32, 0, 0}));
}

TEST(UsualRetention, DevicesKeepNoTokensInFourBits) {
  EngineOptions options;
  for (const bool on_device : {false, true}) {
    KvCacheSpec cache = cache_of({{0, {0, 1}}});
    options.kv_eviction = kH2oOf32;
    EXPECT_TRUE(usual_retention(options, on_device, cache).ok());
    options.kv_eviction = R"({"policy": "mikv", "budget": 32})";
    const Status status = usual_retention(options, on_device, cache).status();
    EXPECT_EQ(status.ok(), !on_device) << status.message();
    const bool named = status.message().find("mikv needs the CPU") != std::string::npos;
    EXPECT_EQ(named, on_device) << status.message();
  }
}

TEST(EvictionSchedule, BudgetsByLayerNeedGroupsByLayer) {
  const KvCacheSpec cache = cache_of({{0, {0, 1, 3}}, {128, {2}}});
  EXPECT_NE(error_of(cache, kPyramidOf64).find("a server started with"), std::string::npos);
  const KvCacheSpec by_layer = group_by_layer(cache);
  ASSERT_EQ(by_layer.groups.size(), 4u);
  const auto policy = kv_cache::make_retention(kPyramidOf64);
  ASSERT_TRUE(policy.ok());
  const auto schedule = eviction_schedule(**policy, by_layer);
  ASSERT_TRUE(schedule.ok()) << schedule.status().message();
  EXPECT_GT(schedule->budgets[0], schedule->budgets[2]);
  EXPECT_EQ(schedule->budgets[3], 0);
}

// Each of these says in one line why no key can go.
TEST(EvictionSchedule, RefusesWhatItCannotEvict) {
  const KvGroup full{0, {0, 1}};
  KvGroup state{0, {2}};
  state.kind = KvKind::kState;
  EXPECT_NE(error_of(cache_of({full, state}), kH2oOf32).find("models with states"),
            std::string::npos);
  KvGroup cross{0, {2}};
  cross.kind = KvKind::kCross;
  cross.cross = 100;
  EXPECT_NE(error_of(cache_of({full, cross}), kH2oOf32).find("encoder-decoders"),
            std::string::npos);
  KvGroup two_way = full;
  two_way.two_way = true;
  EXPECT_NE(error_of(cache_of({two_way}), kH2oOf32).find("both ways"), std::string::npos);
  KvCacheSpec biased = cache_of({full});
  biased.layers[1].shape.biased = true;
  EXPECT_NE(error_of(biased, kH2oOf32).find("bias by distance"), std::string::npos);
  EXPECT_NE(error_of(cache_of({{128, {0, 1}}}), kH2oOf32).find("no layer"), std::string::npos);
  for (const ops::KvType type : {ops::KvType::kInt4, ops::KvType::kK8V4, ops::KvType::kInt8})
    EXPECT_EQ(error_of(cache_of({full}, type), kH2oOf32), "");
}

constexpr const char* kMikvOf32 = R"({"policy": "mikv", "budget": 32})";

TEST(EvictionSchedule, CoarseTokensNeedAWiderCache) {
  const KvCacheSpec cache = cache_of({{0, {0, 2}}, {128, {1}}});
  const auto policy = kv_cache::make_retention(kMikvOf32);
  ASSERT_TRUE(policy.ok());
  const auto schedule = eviction_schedule(**policy, cache);
  ASSERT_TRUE(schedule.ok()) << schedule.status().message();
  EXPECT_TRUE(schedule->rules.recodes);
  EXPECT_EQ(schedule->parts, (std::vector<int32_t>{3, 0}));

  const KvGroup full{0, {0, 1}};
  for (const ops::KvType type :
       {ops::KvType::kInt8, ops::KvType::kFP8, ops::KvType::kInt4, ops::KvType::kK8V4}) {
    EXPECT_NE(error_of(cache_of({full}, type), kMikvOf32).find("saves nothing beside a cache of"),
              std::string::npos);
  }
  KvCacheSpec latent = cache_of({full});
  for (KvLayer& layer : latent.layers) layer.shape = {ops::KvType::kF16, 1, 96, 64, true};
  EXPECT_NE(error_of(latent, kMikvOf32).find("latent attention (MLA)"), std::string::npos);
}

}  // namespace
}  // namespace freshet::engine

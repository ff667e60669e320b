#include "layers/spec.h"

#include <gtest/gtest.h>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

ModelSpec small_spec() {
  ModelSpec spec;
  spec.vocab_size = 32;
  spec.hidden_size = spec.embedding_size = 16;
  spec.max_context = 64;
  AttentionSpec attention;
  attention.heads = 4;
  attention.kv_heads = 2;
  attention.head_dim = attention.value_dim = 8;
  spec.layers.assign(4, {{{{}, attention}, {{}, MlpSpec{.ff = 32}}}});
  return spec;
}

TEST(Spec, LayersWithOneWindowShareAGroup) {
  ModelSpec spec = small_spec();
  spec.layers[0].attention().window = spec.layers[2].attention().window = 16;
  const KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF16);
  ASSERT_EQ(cache.groups.size(), 2u);
  EXPECT_EQ(cache.groups[0].window, 16);
  EXPECT_EQ(cache.groups[0].layers, (std::vector<int>{0, 2}));
  EXPECT_EQ(cache.groups[1].window, 0);
  EXPECT_EQ(cache.groups[1].layers, (std::vector<int>{1, 3}));
  ASSERT_EQ(cache.layers.size(), 4u);
  EXPECT_EQ(cache.layers[3].shape.kv_heads, 2);
  EXPECT_EQ(cache.layers[3].shape.key_dim, 8);
  EXPECT_FALSE(cache.layers[3].shape.value_is_key_prefix);
}

TEST(Spec, SomeLayersStayWide) {
  ModelSpec spec = small_spec();
  spec.layers[0].attention().window = 16;
  spec.layers[2].branches.insert(spec.layers[2].branches.begin(), spec.layers[2].branches[0]);
  KvTypes types(ops::KvType::kInt4);
  types.wide_layers = {3, 0};
  const KvCacheSpec cache = kv_cache_spec(spec, types);  // layer 2 has two layers of the cache
  std::vector<ops::KvType> got;
  for (const KvLayer& layer : cache.layers) got.push_back(layer.shape.type);
  using enum ops::KvType;
  EXPECT_EQ(got, (std::vector<ops::KvType>{kF16, kInt4, kInt4, kInt4, kF16}));
  EXPECT_EQ(types.describe(), "int4 (f16 in 2 layers)");
}

TEST(Spec, LatentAttentionKeepsOneVectorForAllHeads) {
  ModelSpec spec = small_spec();
  MlaSpec a;
  a.heads = 16;
  a.kv_rank = 512;
  a.rope_dim = 64;
  spec.layers[1].branches[0].body = a;
  const ops::KvShape shape = kv_cache_spec(spec, ops::KvType::kBF16).layers[1].shape;
  EXPECT_EQ(shape.kv_heads, 1);
  EXPECT_EQ(shape.key_dim, 576);
  EXPECT_EQ(shape.value_dim, 512);
  EXPECT_TRUE(shape.value_is_key_prefix);
}

TEST(Spec, BranchesWithStatesShareAGroup) {
  ModelSpec spec = small_spec();
  spec.layers[0].branches = {{{}, ShortConvSpec{.channels = 10, .taps = 3}}};
  spec.layers[2].branches = {{{}, Mamba2Spec{.heads = 2, .head_dim = 16, .state = 8}}};
  const KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF16);
  const int states = cache.state_group();
  ASSERT_EQ(states, 0);
  EXPECT_EQ(cache.groups[0].kind, KvKind::kState);
  EXPECT_EQ(cache.groups[0].layers, (std::vector<int>{0, 2}));
  EXPECT_EQ(cache.layers[0].state_bytes, 128u);  // 2 x 10 numbers, in whole lines
  // Three rows of 32 + 2 x 8 channels, and 2 x 16 x 8 numbers.
  EXPECT_EQ(cache.layers[2].state_bytes, 3 * 48 * 4u + 1024u);
  EXPECT_EQ(cache.state_bytes(), 128u + 576u + 1024u);
  EXPECT_EQ(cache.block_bytes(0), cache.state_bytes());
  EXPECT_EQ(cache.pools(5, 70)[0], 5);
  EXPECT_EQ(cache.pools(5, 70)[1], 70);
}

TEST(Spec, EveryBranchThatStoresHasALayerOfTheCache) {
  ModelSpec spec = small_spec();
  AttentionSpec local = spec.layers[0].attention();
  local.window = 16;
  local.kv_heads = 1;
  spec.layers[0].branches = {{{}, MlpSpec{.ff = 8}}};
  spec.layers[1].branches.insert(spec.layers[1].branches.begin() + 1, {{}, local});
  spec.layers[3].branches.erase(spec.layers[3].branches.begin());
  ASSERT_TRUE(validate(spec).ok());
  const KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF16);
  ASSERT_EQ(cache.layers.size(), 3u);
  EXPECT_EQ(cache.layers[0].shape.kv_heads, 2);
  EXPECT_EQ(cache.layers[1].shape.kv_heads, 1);
  EXPECT_EQ(cache.layers[2].shape.kv_heads, 2);
  ASSERT_EQ(cache.groups.size(), 2u);
  EXPECT_EQ(cache.groups[0].layers, (std::vector<int>{0, 2}));
  EXPECT_EQ(cache.groups[1].layers, (std::vector<int>{1}));
  EXPECT_EQ(last_stored(spec).layer, 2);
  EXPECT_EQ(last_stored(spec).branch, 0);
  for (LayerSpec& layer : spec.layers) layer.branches = {{{}, MlpSpec{.ff = 8}}};
  EXPECT_TRUE(kv_cache_spec(spec, ops::KvType::kF16).layers.empty());
  EXPECT_EQ(last_stored(spec).layer, -1);
}

TEST(Spec, OnlySoundOnesPass) {
  EXPECT_TRUE(validate(small_spec()).ok());
  const auto refused = [](auto change) {
    ModelSpec spec = small_spec();
    change(spec);
    return !validate(spec).ok();
  };
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers.clear(); }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.vocab_size = 0; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].attention().kv_heads = 3; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].attention().head_dim = 0; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].attention().heads = 1 << 19; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].mlp().ff = -1; }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    s.ropes.resize(1);
    s.ropes[0].rotary_dim = 10;
    s.layers[1].attention().rope = 0;
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    s.ropes.resize(1);
    s.ropes[0].rotary_dim = 7;
    s.layers[1].attention().rope = 0;
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    MoeSpec moe;
    moe.routing.experts = 4;
    moe.routing.top_k = 5;
    moe.expert_ff = 8;
    s.layers[1].branches[1].body = moe;
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].branches.clear(); }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    s.layers[1].branches.resize(kMaxBranches + 1, s.layers[1].branches[1]);
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].parallel = true; }));
  EXPECT_FALSE(refused([](ModelSpec& s) {
    s.layers[1].parallel = true;
    s.layers[1].branches[0].norms.in = NormSpec{};
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    MlaSpec a;
    a.heads = 4;
    a.kv_rank = a.nope_dim = a.value_dim = 8;
    s.layers[1].branches[0].body = a;
  }));
}

}  // namespace
}  // namespace freshet

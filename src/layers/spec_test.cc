#include "layers/spec.h"

#include <gtest/gtest.h>

namespace freshet {
namespace {

ModelSpec small_spec() {
  ModelSpec spec;
  spec.vocab_size = 32;
  spec.hidden_size = spec.embedding_size = 16;
  spec.max_context = 64;
  LayerSpec layer;
  layer.attention.heads = 4;
  layer.attention.kv_heads = 2;
  layer.attention.head_dim = layer.attention.value_dim = 8;
  layer.mlp.ff = 32;
  spec.layers.assign(4, layer);
  return spec;
}

TEST(Spec, LayersWithOneWindowShareAGroup) {
  ModelSpec spec = small_spec();
  spec.layers[0].attention.window = spec.layers[2].attention.window = 16;
  const KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF16);
  ASSERT_EQ(cache.groups.size(), 2u);
  EXPECT_EQ(cache.groups[0].window, 16);
  EXPECT_EQ(cache.groups[0].layers, (std::vector<int>{0, 2}));
  EXPECT_EQ(cache.groups[1].window, 0);
  EXPECT_EQ(cache.groups[1].layers, (std::vector<int>{1, 3}));
  ASSERT_EQ(cache.layers.size(), 4u);
  EXPECT_EQ(cache.layers[3].kv_heads, 2);
  EXPECT_EQ(cache.layers[3].key_dim, 8);
  EXPECT_FALSE(cache.layers[3].value_is_key_prefix);
}

TEST(Spec, LatentAttentionKeepsOneVectorForAllHeads) {
  AttentionSpec a;
  a.kind = AttentionSpec::Kind::kMla;
  a.heads = a.kv_heads = 16;
  a.kv_rank = 512;
  a.rope_dim = 64;
  const ops::KvShape shape = kv_shape(a, ops::KvType::kBF16);
  EXPECT_EQ(shape.kv_heads, 1);
  EXPECT_EQ(shape.key_dim, 576);
  EXPECT_EQ(shape.value_dim, 512);
  EXPECT_TRUE(shape.value_is_key_prefix);
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
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].attention.kv_heads = 3; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].attention.head_dim = 0; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].attention.heads = 1 << 19; }));
  EXPECT_TRUE(refused([](ModelSpec& s) { s.layers[1].mlp.ff = -1; }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    s.ropes.resize(1);
    s.ropes[0].rotary_dim = 10;
    s.layers[1].attention.rope = 0;
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    s.ropes.resize(1);
    s.ropes[0].rotary_dim = 7;
    s.layers[1].attention.rope = 0;
  }));
  EXPECT_TRUE(refused([](ModelSpec& s) {
    s.layers[1].moe.emplace();
    s.layers[1].moe->routing.experts = 4;
    s.layers[1].moe->routing.top_k = 5;
    s.layers[1].moe->expert_ff = 8;
  }));
}

}  // namespace
}  // namespace freshet

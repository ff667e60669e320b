#include "kv_cache/kv_storage.h"

#include <cstring>

#include <gtest/gtest.h>

namespace freshet {
namespace {

KvCacheSpec spec_of_three() {
  KvCacheSpec spec;
  for (int i = 0; i < 3; ++i) {
    ops::KvShape shape;
    shape.kv_heads = 2;
    shape.key_dim = 8 * (i + 1);
    shape.value_dim = 8;
    spec.layers.push_back({shape});
  }
  spec.groups = {{0, {0, 2}}, {64, {1}}};
  return spec;
}

TEST(KvStorage, KeepsLayersOfAGroupTogether) {
  const KvCacheSpec spec = spec_of_three();
  EXPECT_EQ(spec.block_bytes(0), spec.layers[0].block_bytes() + spec.layers[2].block_bytes());
  auto storage = KvStorage::allocate(spec, {4, 2});
  ASSERT_TRUE(storage.ok());
  EXPECT_EQ(storage->group_of(2), 0);
  EXPECT_EQ(storage->group_of(1), 1);
  EXPECT_EQ(storage->layer(0).blocks, 4);
  EXPECT_EQ(storage->layer(1).blocks, 2);
  EXPECT_EQ(storage->bytes(), 4 * spec.block_bytes(0) + 2 * spec.block_bytes(1));
}

// Bytes of a token and head of 64 features, by hand: 32 + 2 * 2 for 4 bits, 64 + 2 * 2 for 8.
TEST(KvStorage, SizesOfTypes) {
  const auto bytes = [](ops::KvType type, int dim) {
    return ops::KvShape{type, 8, dim, dim, false}.block_bytes() / (16 * 8);
  };
  EXPECT_EQ(bytes(ops::KvType::kF16, 64), 256u);
  EXPECT_EQ(bytes(ops::KvType::kInt8, 64), 136u);
  EXPECT_EQ(bytes(ops::KvType::kInt4, 64), 72u);
  EXPECT_EQ(bytes(ops::KvType::kK8V4, 64), 104u);
  EXPECT_EQ(bytes(ops::KvType::kInt4, 128), 144u);  // 3.56 times less than f16
  EXPECT_EQ(bytes(ops::KvType::kInt4, 80), 108u);   // three whole groups each
}

// Layers of a group may have types of their own: some stay wide.
TEST(KvStorage, CopiesABlockInEveryLayerOfItsGroup) {
  KvCacheSpec spec = spec_of_three();
  spec.layers[0].shape.type = ops::KvType::kInt4;
  spec.layers[2].shape.type = ops::KvType::kF16;
  EXPECT_EQ(spec.type_names(0), "int4 and f16");
  auto storage = KvStorage::allocate(spec, {4, 4});
  ASSERT_TRUE(storage.ok());
  for (int layer = 0; layer < 3; ++layer) {
    const ops::KvView view = storage->layer(layer);
    for (int32_t b = 0; b < 4; ++b) {
      std::memset(view.data + static_cast<size_t>(b) * view.shape.block_bytes(), 10 * layer + b + 1,
                  view.shape.block_bytes());
    }
  }
  storage->copy_block(0, 1, 3);
  for (int layer = 0; layer < 3; ++layer) {
    const ops::KvView view = storage->layer(layer);
    for (int32_t b = 0; b < 4; ++b) {
      const int from = b == 3 && layer != 1 ? 1 : b;
      const uint8_t* block = view.data + static_cast<size_t>(b) * view.shape.block_bytes();
      EXPECT_EQ(block[0], 10 * layer + from + 1);
      EXPECT_EQ(block[view.shape.block_bytes() - 1], 10 * layer + from + 1);
    }
  }
}

}  // namespace
}  // namespace freshet

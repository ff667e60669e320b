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

TEST(KvStorage, CopiesABlockInEveryLayerOfItsGroup) {
  const KvCacheSpec spec = spec_of_three();
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

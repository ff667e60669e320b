// Rows of activations as tiles want them.
#pragma once

#include "backend/cpu/matmul_nest.inl"
#include FRESHET_TILES

namespace freshet::cpu {
namespace {

inline constexpr int kTileRows = 16;

// A tile's rows of a stretch of K: where each plane starts, and the distance of rows.
struct TileRows {
  const uint8_t* plane[2];
  int64_t stride;
};

// Tokens of a tile: a power of two from 4, of which `count` are wanted.
FRESHET_INLINE int tile_height(int64_t count) {
  return count > 8 ? 16 : count > 4 ? 8 : 4;
}

template <int kStretchBytes>
inline constexpr int64_t kCopyStride = kStretchBytes + kLine;

// Rows [t0, t0 + count), `bytes` of each plane from `begin` on. Rows that do not follow each other
// in memory, or are fewer than the tile is high, are copied to `copy`, the last one repeated.
template <int kPlanes, int kStretchBytes>
TileRows tile_rows_at(const MatmulCall& c, int64_t fine, int64_t t0, int64_t count, int64_t begin,
                      int64_t bytes, uint8_t* copy) {
  const int height = tile_height(count);
  TileRows rows{};
  if (c.rows_index == nullptr && count == height) {
    const uint8_t* const at = act_row(c, t0) + begin;
    return {{at, at + fine}, c.act_row_bytes};
  }
  for (int p = 0; p < kPlanes; ++p) {
    rows.plane[p] = copy;
    for (int i = 0; i < height; ++i, copy += kCopyStride<kStretchBytes>) {
      const uint8_t* const from = act_row(c, t0 + (i < count ? i : count - 1)) + p * fine + begin;
      for (int64_t at = 0; at < bytes; at += kLine) store_i(copy + at, load_i(from + at));
    }
  }
  rows.stride = kCopyStride<kStretchBytes>;
  return rows;
}

}  // namespace
}  // namespace freshet::cpu

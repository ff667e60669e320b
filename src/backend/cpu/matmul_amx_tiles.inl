// Tiles: their configuration, and rows of activations as tiles want them.
#pragma once

#include "backend/cpu/matmul_nest.inl"
#include "backend/cpu/matmul_values.inl"

namespace freshet::cpu {
namespace {

// Tiles 0 .. 3 are sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums of `tokens` x 16, over `depth` k.
class Tiles {
 public:
  ~Tiles() { _tile_release(); }
  void configure(int tokens, int depth) {
    if (tokens == tokens_ && depth == depth_) return;
    tokens_ = tokens;
    depth_ = depth;
    TileConfig c;
    for (int i = 0; i < 8; ++i) {
      c.rows[i] = static_cast<uint8_t>(i < 6 ? tokens : depth / 2);
      c.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? depth * 2 : kLine);
    }
    asm volatile("" ::"r"(&c) : "memory");  // the intrinsic does not say that it reads all of c
    _tile_loadconfig(&c);
  }

 private:
  int tokens_ = 0;
  int depth_ = 0;
};

// The intrinsics take tile numbers as text, not as constants.
#define FRESHET_TILES(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
template <int kTile>
FRESHET_INLINE void tile_zero() {
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_zero(n);
  FRESHET_TILES(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
template <int kTile>
FRESHET_INLINE void tile_load(const void* from, int64_t stride) {
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_loadd(n, from, stride);
  FRESHET_TILES(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
template <int kTile>
FRESHET_INLINE void tile_store(float* to) {
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_stored(n, to, kLine);
  FRESHET_TILES(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
// Sums kTile += x of tile kX times weights of tile kW.
template <int kTile, int kX, int kW>
FRESHET_INLINE void tile_dp() {
#define FRESHET_TILE_CASE(n)                                   \
  if constexpr (kTile == n) {                                  \
    if constexpr (kX == 4 && kW == 6) _tile_dpbf16ps(n, 4, 6); \
    if constexpr (kX == 4 && kW == 7) _tile_dpbf16ps(n, 4, 7); \
    if constexpr (kX == 5 && kW == 6) _tile_dpbf16ps(n, 5, 6); \
    if constexpr (kX == 5 && kW == 7) _tile_dpbf16ps(n, 5, 7); \
  }
  FRESHET_TILE_CASE(0) FRESHET_TILE_CASE(1) FRESHET_TILE_CASE(2) FRESHET_TILE_CASE(3)
#undef FRESHET_TILE_CASE
}

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

// Rows [t0, t0 + count) from k = b0 * 32 on. Rows that do not follow each other in memory, or are
// fewer than the tile is high, are copied to `copy`, the last one repeated.
template <int kStretchK>
inline constexpr int64_t kCopyStride = kStretchK * 2 + kLine;
template <int kPlanes, int kStretchK>
TileRows tile_rows_at(const MatmulCall& c, int64_t fine, int64_t t0, int64_t count, int64_t b0,
                      int64_t b1, uint8_t* copy) {
  const int height = tile_height(count);
  TileRows rows{};
  if (c.rows_index == nullptr && count == height) {
    const uint8_t* const at = act_row(c, t0) + b0 * 64;
    return {{at, at + fine}, c.act_row_bytes};
  }
  for (int p = 0; p < kPlanes; ++p) {
    rows.plane[p] = copy;
    for (int i = 0; i < height; ++i, copy += kCopyStride<kStretchK>) {
      const uint8_t* const from = act_row(c, t0 + (i < count ? i : count - 1)) + p * fine + b0 * 64;
      for (int64_t b = 0; b < b1 - b0; ++b) store_i(copy + b * 64, load_i(from + b * 64));
    }
  }
  rows.stride = kCopyStride<kStretchK>;
  return rows;
}

}  // namespace
}  // namespace freshet::cpu

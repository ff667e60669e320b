// The tile registers: 0 .. 3 for sums, 4 and 5 for activations, 6 and 7 for weights (Intel SDM,
// AMX). tiles_emulated.h has the same names for processors without them.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace freshet::cpu {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Sums of `tokens` x 16 values, over rows of `bytes` bytes of activations.
class Tiles {
 public:
  ~Tiles() { _tile_release(); }
  void configure(int tokens, int bytes) {
    if (tokens == tokens_ && bytes == bytes_) return;
    tokens_ = tokens;
    bytes_ = bytes;
    TileConfig c;
    for (int i = 0; i < 8; ++i) {
      c.rows[i] = static_cast<uint8_t>(i < 6 ? tokens : bytes / 4);
      c.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? bytes : 64);
    }
    asm volatile("" ::"r"(&c) : "memory");  // the intrinsic does not declare that it reads all of c
    _tile_loadconfig(&c);
  }

 private:
  int tokens_ = 0;
  int bytes_ = 0;
};

// Instructions that do nothing, placed after a load or a multiplication if there is little other
// work. While the core's other hyper-thread is busy, tile instructions in close succession take 1.5
// to 2 times as long. On an otherwise idle core the extra instructions cost nothing.
FRESHET_INLINE void tile_load_gap() {
  asm volatile("nop\n nop\n nop\n nop");
}
FRESHET_INLINE void tile_product_gap() {
  asm volatile("nop\n nop\n nop\n nop\n nop\n nop\n nop\n nop");
}

// The intrinsics take tile numbers as literals, not as constants.
#define FRESHET_EACH_TILE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
template <int kTile>
FRESHET_INLINE void tile_zero() {
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_zero(n);
  FRESHET_EACH_TILE(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
template <int kTile>
FRESHET_INLINE void tile_load(const void* from, int64_t stride) {
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_loadd(n, from, stride);
  FRESHET_EACH_TILE(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
// The same, without keeping the data in the L1 cache.
template <int kTile>
FRESHET_INLINE void tile_load_once(const void* from, int64_t stride) {
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_stream_loadd(n, from, stride);
  FRESHET_EACH_TILE(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
// Rows of 64 bytes, contiguous.
template <int kTile>
FRESHET_INLINE void tile_store(void* to){
#define FRESHET_TILE_CASE(n) \
  if constexpr (kTile == n) _tile_stored(n, to, 64);
    FRESHET_EACH_TILE(FRESHET_TILE_CASE)
#undef FRESHET_TILE_CASE
}
// Tile kTile += activations of tile kX times weights of tile kW: BF16 to F32, or signed bytes times
// signed (i8) or unsigned (u8) bytes to 32-bit integers.
#define FRESHET_TILE_PRODUCT(name, intrinsic) \
  template <int kTile, int kX, int kW>        \
  FRESHET_INLINE void name() {                \
    FRESHET_TILE_CASE(0, intrinsic)           \
    FRESHET_TILE_CASE(1, intrinsic)           \
    FRESHET_TILE_CASE(2, intrinsic)           \
    FRESHET_TILE_CASE(3, intrinsic)           \
  }
#define FRESHET_TILE_CASE(n, intrinsic)                   \
  if constexpr (kTile == n) {                             \
    if constexpr (kX == 4 && kW == 6) intrinsic(n, 4, 6); \
    if constexpr (kX == 4 && kW == 7) intrinsic(n, 4, 7); \
    if constexpr (kX == 5 && kW == 6) intrinsic(n, 5, 6); \
    if constexpr (kX == 5 && kW == 7) intrinsic(n, 5, 7); \
  }
FRESHET_TILE_PRODUCT(tile_dp_bf16, _tile_dpbf16ps) FRESHET_TILE_PRODUCT(tile_dp_i8, _tile_dpbssd)
    FRESHET_TILE_PRODUCT(tile_dp_u8, _tile_dpbsud)
#undef FRESHET_TILE_CASE
#undef FRESHET_TILE_PRODUCT
#undef FRESHET_EACH_TILE

}  // namespace
}  // namespace freshet::cpu

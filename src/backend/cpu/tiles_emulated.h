// tiles_amx.h in plain code, so that tile kernels can be tested on processors without tiles.
//
// Written from the pseudocode of TILELOADD, TILESTORED, TDPBSSD, TDPBSUD and TDPBF16PS (Intel SDM).
// Each thread has its own tiles.
#pragma once

#include <cstdint>
#include <cstring>

namespace freshet::cpu {
namespace {

struct EmulatedTile {
  int rows = 0;
  int row_bytes = 0;
  uint8_t bytes[16][64];
};
thread_local EmulatedTile emulated_tiles[8];

class Tiles {
 public:
  void configure(int tokens, int bytes) {
    for (int i = 0; i < 8; ++i) {
      EmulatedTile& t = emulated_tiles[i];
      t.rows = i < 6 ? tokens : bytes / 4;
      t.row_bytes = i == 4 || i == 5 ? bytes : 64;
      std::memset(t.bytes, 0, sizeof t.bytes);
    }
  }
};

inline void tile_load_gap() {}
inline void tile_product_gap() {}
template <int kTile>
void tile_zero() {
  std::memset(emulated_tiles[kTile].bytes, 0, sizeof emulated_tiles[kTile].bytes);
}
template <int kTile>
void tile_load(const void* from, int64_t stride) {
  EmulatedTile& t = emulated_tiles[kTile];
  tile_zero<kTile>();
  for (int i = 0; i < t.rows; ++i) {
    std::memcpy(t.bytes[i], static_cast<const uint8_t*>(from) + i * stride,
                static_cast<size_t>(t.row_bytes));
  }
}
template <int kTile>
void tile_load_once(const void* from, int64_t stride) {
  tile_load<kTile>(from, stride);
}
template <int kTile>
void tile_store(void* to) {
  const EmulatedTile& t = emulated_tiles[kTile];
  for (int i = 0; i < t.rows; ++i) std::memcpy(static_cast<uint8_t*>(to) + i * 64, t.bytes[i], 64);
}
template <class Weight, int kTile, int kX, int kW>
void emulated_dp() {
  EmulatedTile& sums = emulated_tiles[kTile];
  const EmulatedTile &x = emulated_tiles[kX], &w = emulated_tiles[kW];
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      std::memcpy(&sum, &sums.bytes[m][n * 4], 4);
      for (int k = 0; k < x.row_bytes; ++k) {
        sum += int32_t{static_cast<int8_t>(x.bytes[m][k])} *
               int32_t{static_cast<Weight>(w.bytes[k / 4][n * 4 + k % 4])};
      }
      std::memcpy(&sums.bytes[m][n * 4], &sum, 4);
    }
  }
}
// Denormals count as zero.
inline float no_denormal(float v) {
  return __builtin_fabsf(v) < 0x1p-126f ? __builtin_copysignf(0.0f, v) : v;
}
inline float bf16_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return no_denormal(v);
}
template <int kTile, int kX, int kW>
void tile_dp_bf16() {
  EmulatedTile& sums = emulated_tiles[kTile];
  const EmulatedTile &x = emulated_tiles[kX], &w = emulated_tiles[kW];
  for (int m = 0; m < sums.rows; ++m) {
    for (int n = 0; n < 16; ++n) {
      float sum, of[2] = {};  // sums of even and of odd values
      std::memcpy(&sum, &sums.bytes[m][n * 4], 4);
      for (int k = 0; k < x.row_bytes / 2; ++k) {
        const float product_of[] = {bf16_at(&x.bytes[m][k * 2]),
                                    bf16_at(&w.bytes[k / 2][n * 4 + k % 2 * 2])};
        of[k % 2] = no_denormal(__builtin_fmaf(product_of[0], product_of[1], of[k % 2]));
      }
      sum = no_denormal(no_denormal(sum) + no_denormal(of[0] + of[1]));
      std::memcpy(&sums.bytes[m][n * 4], &sum, 4);
    }
  }
}
template <int kTile, int kX, int kW>
void tile_dp_i8() {
  emulated_dp<int8_t, kTile, kX, kW>();
}
template <int kTile, int kX, int kW>
void tile_dp_u8() {
  emulated_dp<uint8_t, kTile, kX, kW>();
}

}  // namespace
}  // namespace freshet::cpu

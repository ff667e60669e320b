// Formats in blocks of 32 elements with one scale each, as tiles (formats.cuh).
#pragma once

#include "backend/cuda/formats/lanes.cuh"

namespace freshet::cuda {

template <class F>
inline constexpr bool kHasHeads = heads_of(F::kCode) != F::kCode;
template <class F>
struct Heads {  // the stored scales, [16 rows][blocks][bytes]
  static constexpr int kHead = 0, kUnit = F::kUnit, kBlock = F::kBlock, kBytes = F::kBytes;
  static constexpr int kRowBytes = kUnit / kBlock * F::kHeadBytes, kTileBytes = 16 * kRowBytes;
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < kTileBytes; i += 256) {
      const uint8_t* row = rows[i / kRowBytes];
      const int block = i % kRowBytes / F::kHeadBytes;
      tile[i] = row != nullptr && block * kBlock < left
                    ? row[block * kBytes + F::kHeadAt + i % F::kHeadBytes]
                    : 0;
    }
  }
};

// INT8 codes, stored plus 128.
struct Q8_0 : Whole {
  static constexpr Code kCode = Code::kQ8_0;
  static constexpr int kUnit = 64, kVectors = 2, kTileBytes = 16 * 64 + 64, kBlock = 32,
                       kBytes = 34, kHeadAt = 0, kHeadBytes = 2;
  using Scales = Scaled<7>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    for (int i = 0; i < 2; ++i)
      p.q[i] = From::get(reinterpret_cast<const uint4*>(tile) + i * 32 + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 1024) + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  // Bytes `first` and `first` + 1 of w.
  static __device__ uint32_t two(uint32_t w, int first) {
    return __byte_perm(w, 0, 0x4140 + first * 0x0101);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int k = 0; k < 4; ++k) {
      const uint32_t low = k % 2 == 0 ? p.q[k / 2].x : p.q[k / 2].z;
      const uint32_t high = k % 2 == 0 ? p.q[k / 2].y : p.q[k / 2].w;
      const auto [g, h] = Scales::lines(k < 2 ? p.s.x : p.s.y);
      a[k] = make_uint4(g(two(low, 0)), h(two(low, 2)), g(two(high, 0)), h(two(high, 2)));
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int row = i / 64, col = i % 64;
      const bool real = rows[row] != nullptr && col < left;
      tile[byte_place(row, col)] = real ? rows[row][col / 32 * 34 + 2 + col % 32] ^ 0x80 : 0;
    }
    pack_used<Scales>(tile + 1024, rows, left, thread, 34);
  }
  // Packs the converted scales: [8 (g)][block] of rows g and g + 8.
  template <class Its>
  static __device__ void pack_used(uint8_t* to, const uint8_t* const* rows, int64_t left, int i,
                                   int block_bytes) {
    if (i >= 16) return;
    const auto scale = [&](const uint8_t* row) {
      return row != nullptr && i % 2 * 32 < left ? half_at(row + i % 2 * block_bytes) : 0.0f;
    };
    reinterpret_cast<uint32_t*>(to)[i] = Its::pack(scale(rows[i / 2]), scale(rows[i / 2 + 8]));
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return static_cast<float>(tile[byte_place(row, col)] - 128) *
           half_at(heads + row * 4 + col / 32 * 2);
  }
};

struct Q4_0 : Whole {
  static constexpr Code kCode = Code::kQ4_0;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 64, kBlock = 32, kBytes = 18;
  static constexpr int kHeadAt = 0, kHeadBytes = 2;
  using Scales = Scaled<3, 0, 4>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 512) + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      const uint32_t next = q[k] >> 8;
      const auto [g, h] = Scales::lines(k < 2 ? p.s.x : p.s.y);
      a[k] = make_uint4(g(q[k] & 0x000f000f), h(q[k] & 0x00f000f0), g(next & 0x000f000f),
                        h(next & 0x00f000f0));
    }
  }
  static __device__ int stored(const uint8_t* block, int col) {  // col: 0 to 31
    return (block[2 + col % 16] >> (col / 16 * 4)) & 15;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    pack_numbers(tile, rows, left, thread);
    Q8_0::pack_used<Scales>(tile + 512, rows, left, thread, kBytes);
  }
  static __device__ void pack_numbers(uint8_t* tile, const uint8_t* const* rows, int64_t left,
                                      int thread) {
    if (thread < 128) {  // 4 bytes per thread: eight codes of 16 columns
      const int lane = thread / 4, k = thread % 4;
      uint32_t bits = 0;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n), col = k * 16 + operand_col(lane, n);
        if (rows[row] == nullptr || col >= left) continue;
        bits |= static_cast<uint32_t>(stored(rows[row] + col / 32 * kBytes, col % 32))
                << (n % 2 * 16 + n / 2 % 4 * 4);
      }
      reinterpret_cast<uint32_t*>(tile)[lane * 4 + k] = bits;
    }
  }
  static __device__ int quant(const uint8_t* tile, int row, int col) {
    const int bit = nibble_bit(row, col);
    return (reinterpret_cast<const uint32_t*>(tile)[bit / 32] >> (bit % 32)) & 15;
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return static_cast<float>(quant(tile, row, col) - 8) * half_at(heads + row * 4 + col / 32 * 2);
  }
};

struct MXFP4 : Plain {
  static constexpr Code kCode = Code::kMXFP4;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 32, kBlock = 32, kBytes = 17;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.s.x = From::get(reinterpret_cast<const uint32_t*>(tile + 512) + lane / 4);
  }
  // Value of an E2M1 code: m is twice its magnitude, and d (scale()) is half of the block's scale.
  static __device__ float value(uint32_t code, float d) {
    const uint32_t m = code & 7;
    const float v = static_cast<float>(m < 4 ? m : m < 6 ? m * 2 - 4 : m * 4 - 16);
    return (code & 8 ? -v : v) * d;
  }
  static __device__ float scale(uint32_t e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  // Values are stored times 2^-kDown, so that a scale and the power of two that two() leaves out
  // are one factor. No weight has scales beyond 2^65 or below 2^-62.
  static constexpr int kDown = 64;
  static constexpr float kUp = 0x1p64f;
  // The exponent of the factor in BF16: the block's E8M0 exponent, at most kMost, plus kMore.
  static constexpr uint32_t kMore = 126 - kDown, kMost = 254 - kMore;
  // The bits of a half in which register j's code has its sign and its other bits (exponent and
  // mantissa), chosen so that two() needs the fewest shifts.
  static __device__ int sign_of(int j) { return j == 0 ? 10 : j == 1 ? 12 : j == 2 ? 9 : 11; }
  static __device__ int rest_of(int j) { return j == 0 ? 6 : j == 1 ? 3 : j == 2 ? 0 : 13; }
  // Register j's two codes, all bits in place: 2^-126 times the value.
  template <int j>
  static __device__ uint32_t two(uint32_t w) {
    constexpr uint32_t kSign = 0x80008000, kRest = 0x01c001c0;
    if constexpr (j == 0) return (w & kRest) | (w << 5 & kSign);
    if constexpr (j == 3) return (w >> 7 & kRest) | (w << 4 & kSign);
    return w << (j == 1 ? 3 : 6) & (kSign | kRest);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      const uint32_t both = __byte_perm(p.s.x, 0, k < 2 ? 0x4140 : 0x4342) << 7;
      const uint32_t g = low2(both), h = high2(both);
      a[k] = make_uint4(mul2(two<0>(q[k]), g), mul2(two<1>(q[k]), h), mul2(two<2>(q[k]), g),
                        mul2(two<3>(q[k]), h));
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    if (thread < 128) {
      const int lane = thread / 4, k = thread % 4;
      uint32_t bits = 0;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n), col = k * 16 + operand_col(lane, n);
        if (rows[row] == nullptr || col >= left) continue;
        const uint8_t* block = rows[row] + col / 32 * kBytes;
        const uint32_t code = (block[1 + col % 16] >> (col % 32 / 16 * 4)) & 15;
        const int half = n % 2 * 16, j = n / 2;
        bits |= (code & 7) << (half + rest_of(j)) | code >> 3 << (half + sign_of(j));
      }
      reinterpret_cast<uint32_t*>(tile)[lane * 4 + k] = bits;
    }
    if (thread < 32) {
      const int g = thread / 4, block = thread / 2 % 2, row = g + thread % 2 * 8;
      const bool real = rows[row] != nullptr && block * 32 < left;
      const uint32_t e = real ? rows[row][block * kBytes] : 0;
      tile[512 + thread] = static_cast<uint8_t>((e < kMost ? e : kMost) + kMore);
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2, j = col % 16 / 8 * 2 + row / 8;
    const uint32_t bits =
        reinterpret_cast<const uint32_t*>(tile)[lane * 4 + col / 16] >> (col % 2 * 16);
    const uint32_t code = (bits >> rest_of(j) & 7) | (bits >> sign_of(j) & 1) << 3;
    return value(code, scale(tile[512 + row % 8 * 4 + col / 32 * 2 + row / 8] - kMore));
  }
};

}  // namespace freshet::cuda

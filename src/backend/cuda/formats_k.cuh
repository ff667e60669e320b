// Formats in blocks of 256 numbers with scales of parts of them, as tiles (formats.cuh).
#pragma once

#include "backend/cuda/formats_blocks.cuh"

namespace freshet::cuda {

// Scale and least value of group g (of 8) in the 16 bytes that begin a stored block.
__device__ __forceinline__ uint2 scale_min(const uint8_t* head, int g) {
  const auto byte = [&](int i) { return uint32_t{head[4 + i]}; };
  if (g < 4) return {byte(g) & 63, byte(g + 4) & 63};
  return {(byte(g + 4) & 15) | (byte(g - 4) >> 6 << 4), (byte(g + 4) >> 4) | (byte(g) >> 6 << 4)};
}

// The scales of 16 rows by 256 columns:
//   [8 (g)][4 pieces] words: a byte for each of row g's two groups, and of row g + 8's, has a scale
//     in its lower six bits; its upper two are bits 2 p and 2 p + 1 of a byte of the rows' d
//   [8 (g)][4 (t)] words: least values of groups 2 t, 2 t + 1 of row g at bits 0 and 16, of row
//     g + 8 at 6 and 22; at 12 and 28 four bits (t, from the lowest) of the rows' factor of these
struct Q4_K {
  static constexpr Code kCode = Code::kQ4_K;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 4 * 512 + 256;
  static constexpr int kBlock = 256, kBytes = 144;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    const uint4 w = From::get(reinterpret_cast<const uint4*>(tile + 2048) + lane / 4);
    p.s.x = (piece < 2 ? piece == 0 ? w.x : w.y : piece == 2 ? w.z : w.w) & 0x3f3f3f3f;
    p.s.y = (w.x >> 6 & 0x03030303) | (w.y >> 4 & 0x0c0c0c0c) | (w.z >> 2 & 0x30303030) |
            (w.w & 0xc0c0c0c0);
  }
  static constexpr int kGroup = 2;
  static constexpr bool kMins = true;
  static __device__ uint32_t two(uint32_t w) { return sub2(two_nibbles(w), k128); }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      a[k] = make_uint4(two(q[k]), two(q[k] >> 4), two(q[k] >> 8), two(q[k] >> 12));
    }
  }
  // d times byte i of w, which is read as the float 2^23 + byte.
  static __device__ float times(float d, uint32_t w, int i) {
    return __fmaf_rn(__uint_as_float(__byte_perm(w, 0x4b000000, 0x7440 + i)), d, d * -8388608.0f);
  }
  static __device__ Scales scales(const Piece& p, int, int group) {
    return {times(half_bits(p.s.y & 0xffff), p.s.x, group),
            times(half_bits(p.s.y >> 16), p.s.x, 2 + group)};
  }
  // A lane's operand of the 16 rows' least values.
  template <class From>
  static __device__ Least least(const uint8_t* tile, int lane) {
    const uint4 w = From::get(reinterpret_cast<const uint4*>(tile + 2176) + lane / 4);
    const uint32_t mine = From::get(reinterpret_cast<const uint32_t*>(tile + 2176) + lane);
    const uint32_t d = (w.x >> 12 & 0x000f000f) | (w.y >> 8 & 0x00f000f0) |
                       (w.z >> 4 & 0x0f000f00) | (w.w & 0xf000f000);
    return {sub2(two_small(mine), k128), sub2(two_small(mine >> 6), k128), d};
  }
  static __device__ uint32_t two_small(uint32_t w) { return (w & 0x003f003f) | k128; }
  static __device__ uint32_t stored(const uint8_t* block, int col) {
    return (block[16 + col / 64 * 32 + col % 32] >> (col % 64 / 32 * 4)) & 15;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t, int thread) {
    for (int i = thread; i < 512; i += 256) {
      const int piece = i / 128, lane = i / 4 % 32, k = i % 4;
      uint32_t bits = 0;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n), col = piece * 64 + k * 16 + operand_col(lane, n);
        if (rows[row] == nullptr) continue;
        bits |= stored(rows[row], col) << (n % 2 * 16 + n / 2 % 4 * 4);
      }
      reinterpret_cast<uint32_t*>(tile)[i] = bits;
    }
    if (thread < 64) pack_word(reinterpret_cast<uint32_t*>(tile + 2048) + thread, rows, thread);
  }
  static __device__ void pack_word(uint32_t* to, const uint8_t* const* rows, int i) {
    const int g = i % 32 / 4, n = i % 4;  // n: the piece, or t
    uint32_t word = 0;
    for (int half = 0; half < 2; ++half) {
      const uint8_t* row = rows[g + half * 8];
      if (row == nullptr) continue;
      for (int k = 0; k < 2; ++k) {
        const uint2 s = scale_min(row, 2 * n + k);
        if (i < 32) {
          word |= (s.x | (row[k] >> 2 * n & 3u) << 6) << (half * 16 + k * 8);
        } else {
          word |= s.y << (k * 16 + half * 6);
        }
      }
      if (i >= 32) word |= (row[2 + n / 2] >> n % 2 * 4 & 15u) << (half * 16 + 12);
    }
    *to = word;
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return affine(tile, row, col,
                  static_cast<uint32_t>(Q4_0::quant(tile + col / 64 * 512, row, col % 64)));
  }
  // The number that q stands for there.
  static __device__ float affine(const uint8_t* tile, int row, int col, uint32_t q) {
    const auto* words = reinterpret_cast<const uint32_t*>(tile + 2048) + row % 8 * 4;
    const int half = row / 8, group = col / 32;
    uint32_t d = 0, least = 0;
    for (int n = 0; n < 4; ++n) {
      for (int k = 0; k < 2; ++k) {
        d |= (words[n] >> (half * 16 + k * 8 + 6) & 3) << (k * 8 + n * 2);
      }
      least |= (words[32 + n] >> (half * 16 + 12) & 15) << (n * 4);
    }
    const uint32_t scale = words[group / 2] >> (half * 16 + group % 2 * 8) & 63;
    const uint32_t m = words[32 + group / 2] >> (group % 2 * 16 + half * 6) & 63;
    return __fsub_rn(static_cast<float>(q) * (half_bits(d) * static_cast<float>(scale)),
                     half_bits(least) * static_cast<float>(m));
  }
};

// Low four bits as Q4_K's, the two high bits [piece][32 lanes][2 of 32 columns] (number n of the
// first or second 16 at bit 16 (n % 2) + 2 (n / 2), or 8 further), scales [16 rows][16], and d
// [16 rows].
struct Q6_K {
  static constexpr Code kCode = Code::kQ6_K;
  static constexpr int kUnit = 256, kVectors = 2, kTileBytes = 4 * 512 + 4 * 256 + 256 + 32;
  static constexpr int kBlock = 256, kBytes = 210;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    const uint2 high = From::get(reinterpret_cast<const uint2*>(tile + 2048) + piece * 32 + lane);
    p.q[1].x = high.x;
    p.q[1].y = high.y;
    p.q[1].z = From::get(reinterpret_cast<const uint32_t*>(tile + 3072) + lane / 4 * 4 + piece);
    p.q[1].w =
        From::get(reinterpret_cast<const uint32_t*>(tile + 3072) + (lane / 4 + 8) * 4 + piece);
    const auto* d = reinterpret_cast<const uint16_t*>(tile + 3328);
    p.s.x = From::get(d + lane / 4) | uint32_t{From::get(d + lane / 4 + 8)} << 16;
  }
  static constexpr int kGroup = 1;
  static constexpr bool kMins = false;
  static __device__ uint32_t two(uint32_t low, uint32_t high) {
    return sub2(two_nibbles(low) | (high & 0x00300030), k160);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      const uint32_t h = k < 2 ? p.q[1].x : p.q[1].y;
      a[k] = k % 2 == 0 ? make_uint4(two(q[k], h << 4), two(q[k] >> 4, h << 2), two(q[k] >> 8, h),
                                     two(q[k] >> 12, h >> 2))
                        : make_uint4(two(q[k], h >> 4), two(q[k] >> 4, h >> 6),
                                     two(q[k] >> 8, h >> 8), two(q[k] >> 12, h >> 10));
    }
  }
  static __device__ Scales scales(const Piece& p, int, int group) {
    return {
        half_bits(p.s.x & 0xffff) *
            static_cast<float>(static_cast<int8_t>(p.q[1].z >> (8 * group))),
        half_bits(p.s.x >> 16) * static_cast<float>(static_cast<int8_t>(p.q[1].w >> (8 * group)))};
  }
  static __device__ uint32_t stored(const uint8_t* b, int i) {
    const int half = i / 128;
    const uint32_t low = (b[half * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
    return low | ((b[128 + half * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) << 4;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t, int thread) {
    uint32_t high = 0;
    for (int k = 0; k < 2; ++k) {
      const int i = thread * 2 + k, lane = thread / 2 % 32;
      uint32_t bits = 0;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n);
        const int col = thread / 64 * 64 + i % 4 * 16 + operand_col(lane, n);
        if (rows[row] == nullptr) continue;
        const uint32_t v = stored(rows[row], col);
        bits |= (v & 15) << (n % 2 * 16 + n / 2 * 4);
        high |= (v >> 4) << (n % 2 * 16 + k * 8 + n / 2 * 2);
      }
      reinterpret_cast<uint32_t*>(tile)[i] = bits;
    }
    reinterpret_cast<uint32_t*>(tile + 2048)[thread] = high;
    const uint8_t* row = rows[thread / 16];
    tile[3072 + thread] = row != nullptr ? row[192 + thread % 16] : 0;
    if (thread < 32) {
      const uint8_t* of = rows[thread / 2];
      tile[3328 + thread] = of != nullptr ? of[208 + thread % 2] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2, k = col % 64 / 16;
    const int j = (col % 16 / 8) * 2 + row / 8;
    const uint32_t high =
        reinterpret_cast<const uint32_t*>(tile + 2048)[col / 64 * 64 + lane * 2 + k / 2] >>
            (col % 2 * 16 + k % 2 * 8 + j * 2) &
        3;
    const int q = Q4_0::quant(tile + col / 64 * 512, row, col % 64) | static_cast<int>(high << 4);
    const float s = half_at(tile + 3328 + 2 * row) *
                    static_cast<float>(static_cast<int8_t>(tile[3072 + row * 16 + col / 16]));
    return static_cast<float>(q - 32) * s;
  }
};

}  // namespace freshet::cuda

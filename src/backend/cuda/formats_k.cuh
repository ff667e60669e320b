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

// The scales of 16 rows by 256 columns; byte n of a piece's four is that of row g + n / 2 * 8 and
// group n % 2:
//   [8 (g)][4 pieces] words: scales in the lower six bits, the lower two bits of least values above
//   [8 (g)][4 pieces] half words: the upper four of least values, in the order 0, 2, 1, 3
//   [8 (g)] scales' factors of both rows, least values'
struct Q4_K : Whole {
  static constexpr Code kCode = Code::kQ4_K;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 4 * 512 + 256;
  static constexpr int kBlock = 256, kBytes = 144;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    const int of = lane / 4 * 4 + piece;
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    const uint2 d = From::get(reinterpret_cast<const uint2*>(tile + 2240) + lane / 4);
    p.s = make_uint4(From::get(reinterpret_cast<const uint32_t*>(tile + 2048) + of),
                     From::get(reinterpret_cast<const uint16_t*>(tile + 2176) + of), d.x, d.y);
  }
  // d times byte i of w times 2^kPower; the byte is read as a float of which it is the lowest bits.
  template <int kPower>
  static __device__ float times(float d, uint32_t w, int i) {
    constexpr uint32_t kOne = static_cast<uint32_t>(127 + 23 + kPower) << 23;
    return __fmaf_rn(__uint_as_float(__byte_perm(w, kOne, 0x7650 + i)), d,
                     d * -__uint_as_float(kOne));
  }
  // a[k] = operand(k, rows g, rows g + 8).
  template <int kMiddle, class Operand>
  static __device__ void decode_centred(const Piece& p, uint4 (&a)[4], const Operand& operand) {
    const uint32_t scales = p.s.x & 0x3f3f3f3f;
    const uint32_t least = (p.s.x >> 6 & 0x03030303) | ((p.s.y | p.s.y << 12) & 0x0f0f0f0f) << 2;
    using Rows = CentredRows<kMiddle>;
    const float d[2] = {half_bits(p.s.z & 0xffff), half_bits(p.s.z >> 16)};
    const float m[2] = {half_bits(p.s.w & 0xffff), half_bits(p.s.w >> 16)};
    for (int k = 0; k < 4; ++k) {
      const int group = k / 2;
      const Rows rows(times<Rows::kScaleBits>(d[0], scales, group),
                      times<Rows::kLeastBits>(m[0], least, group),
                      times<Rows::kScaleBits>(d[1], scales, 2 + group),
                      times<Rows::kLeastBits>(m[1], least, 2 + group));
      a[k] = operand(k, rows.g, rows.h);
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    decode_centred<3>(p, a,
                      [&](int k, const auto& g, const auto& h) { return nibbles(q[k], g, h); });
  }
  // The operand whose numbers a word of four bits each has.
  static __device__ uint4 nibbles(uint32_t w, const Centred<3>& g, const Centred<3>& h) {
    const uint32_t next = w >> 8;
    return make_uint4(g.of<0>(w & 0x000f000f), h.of<4>(w & 0x00f000f0), g.of<0>(next & 0x000f000f),
                      h.of<4>(next & 0x00f000f0));
  }
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
    if (thread < 32) pack_scales(tile, rows, thread);
  }
  static __device__ void pack_scales(uint8_t* tile, const uint8_t* const* rows, int thread) {
    const int g = thread / 4, piece = thread % 4;
    uint32_t low = 0, high = 0;
    for (int n = 0; n < 4; ++n) {
      const uint8_t* row = rows[g + n / 2 * 8];
      const uint2 s = row != nullptr ? scale_min(row, piece * 2 + n % 2) : uint2{0, 0};
      low |= (s.x | (s.y & 3) << 6) << (n * 8);
      high |= s.y >> 2 << (n % 2 * 8 + n / 2 * 4);
    }
    reinterpret_cast<uint32_t*>(tile + 2048)[thread] = low;
    reinterpret_cast<uint16_t*>(tile + 2176)[thread] = static_cast<uint16_t>(high);
    const uint8_t* row = rows[g + piece % 2 * 8];  // and piece / 2: which factor
    uint8_t* to = tile + 2240 + g * 8 + piece / 2 * 4 + piece % 2 * 2;
    for (int i = 0; i < 2; ++i) to[i] = row != nullptr ? row[piece / 2 * 2 + i] : 0;
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return affine(tile, row, col,
                  static_cast<uint32_t>(Q4_0::quant(tile + col / 64 * 512, row, col % 64)));
  }
  // The number that q stands for there.
  static __device__ float affine(const uint8_t* tile, int row, int col, uint32_t q) {
    const int of = row % 8 * 4 + col / 64, n = row / 8 * 2 + col % 64 / 32;
    const uint32_t low = reinterpret_cast<const uint32_t*>(tile + 2048)[of] >> (n * 8);
    const uint32_t high =
        uint32_t{reinterpret_cast<const uint16_t*>(tile + 2176)[of]} >> (n % 2 * 8 + n / 2 * 4);
    const uint8_t* factors = tile + 2240 + row % 8 * 8 + row / 8 * 2;
    return __fsub_rn(static_cast<float>(q) * (half_at(factors) * static_cast<float>(low & 63)),
                     half_at(factors + 4) * static_cast<float>((low >> 6 & 3) | (high & 15) << 2));
  }
};

// Low four bits as Q4_K's, the two high bits [piece][32 lanes][2 of 32 columns] (number n of the
// first or second 16 at bit 16 (n % 2) + 2 (n / 2), or 8 further), scales [16 rows][16], and d
// [16 rows].
struct Q6_K : Whole {
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
  static __device__ uint32_t two(uint32_t low, uint32_t high) {
    return (low & 0x000f000f) | (high & 0x00300030);
  }
  static __device__ float scale(uint32_t d, uint32_t scales, int group) {
    return half_bits(d) * static_cast<float>(static_cast<int8_t>(scales >> (8 * group)));
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      const auto [g, h] =
          lines_of<5, 0>(scale(p.s.x & 0xffff, p.q[1].z, k), scale(p.s.x >> 16, p.q[1].w, k));
      const uint32_t high = k < 2 ? p.q[1].x : p.q[1].y;
      a[k] = k % 2 == 0 ? make_uint4(g(two(q[k], high << 4)), h(two(q[k] >> 4, high << 2)),
                                     g(two(q[k] >> 8, high)), h(two(q[k] >> 12, high >> 2)))
                        : make_uint4(g(two(q[k], high >> 4)), h(two(q[k] >> 4, high >> 6)),
                                     g(two(q[k] >> 8, high >> 8)), h(two(q[k] >> 12, high >> 10)));
    }
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

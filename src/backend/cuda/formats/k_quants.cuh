// Formats in blocks of 256 elements with scales per sub-block, as tiles (formats.cuh).
#pragma once

#include "backend/cuda/formats/blocks32.cuh"

namespace freshet::cuda {

// Scale and minimum of group g (of 8) in the first 16 bytes of a stored block.
__device__ __forceinline__ uint2 scale_min(const uint8_t* head, int g) {
  const auto byte = [&](int i) { return uint32_t{head[4 + i]}; };
  if (g < 4) return {byte(g) & 63, byte(g + 4) & 63};
  return {(byte(g + 4) & 15) | (byte(g - 4) >> 6 << 4), (byte(g + 4) >> 4) | (byte(g) >> 6 << 4)};
}

// The converted parameters of groups of 32 elements: a value is the code's distance from 2^kMiddle
// times the scale, plus the value at 2^kMiddle, both in BF16. Unpacking them from six bits for
// every tile and token would be half of all instructions. Layout: [4 pieces][8 (g)][group][row
// half] (scale, value), for 16 rows by 256 columns.
template <int kMiddle>
struct KGroups {
  static constexpr int kBytes = 512;
  template <class From>
  static __device__ uint4 load(const uint8_t* groups, int piece, int lane) {
    return From::get(reinterpret_cast<const uint4*>(groups) + piece * 8 + lane / 4);
  }
  // a[k] = operand(k, parameters of rows g, of rows g + 8).
  template <class Operand>
  static __device__ void decode(const uint4& s, uint4 (&a)[4], const Operand& operand) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t g = k < 2 ? s.x : s.z, h = k < 2 ? s.y : s.w;
      using Row = Centred<kMiddle>;
      a[k] = operand(k, Row{low2(g), high2(g)}, Row{low2(h), high2(h)});
    }
  }
  static __device__ void pack(uint8_t* groups, const uint8_t* const* rows, int thread) {
    if (thread >= 128) return;
    const uint8_t* row = rows[thread / 4 % 8 + thread % 2 * 8];
    uint32_t word = 0;
    if (row != nullptr) {
      const uint2 s = scale_min(row, thread / 32 * 2 + thread / 2 % 2);
      word =
          used(half_at(row) * static_cast<float>(s.x), half_at(row + 2) * static_cast<float>(s.y));
    }
    reinterpret_cast<uint32_t*>(groups)[thread] = word;
  }
  // The word of a group whose values are code * d - minimum.
  static __device__ uint32_t used(float d, float least) {
    using Rows = CentredRows<kMiddle>;
    const Centred<kMiddle> g = Rows(d * Rows::kScaleBy, least * Rows::kLeastBy, 0.0f, 0.0f).g;
    return (g.scale & 0xffff) | (g.add & 0xffff0000);
  }
};

// Codes as in Q4_0: [4 pieces][32 lanes][16 bytes], then the parameters (KGroups).
struct Q4_K : Whole {
  static constexpr Code kCode = Code::kQ4_K;
  using Groups = KGroups<3>;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 4 * 512 + Groups::kBytes;
  static constexpr int kBlock = 256, kBytes = 144, kHeadAt = 0, kHeadBytes = 16;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    p.s = Groups::load<From>(tile + 2048, piece, lane);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    Groups::decode(p.s, a,
                   [&](int k, const auto& g, const auto& h) { return nibbles(q[k], g, h); });
  }
  // The operand of a word of four-bit codes.
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
    Groups::pack(tile + 2048, rows, thread);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* head, int row, int col) {
    return affine(head + row * kHeadBytes, col,
                  static_cast<uint32_t>(Q4_0::quant(tile + col / 64 * 512, row, col % 64)));
  }
  // The value of code q in column col of a row with this header.
  static __device__ float affine(const uint8_t* head, int col, uint32_t q) {
    const uint2 s = scale_min(head, col / 32);
    return __fsub_rn(static_cast<float>(q) * (half_at(head) * static_cast<float>(s.x)),
                     half_at(head + 2) * static_cast<float>(s.y));
  }
};

// The six-bit codes of operand k (of a lane's four), then the scales:
// - [4 pieces][32 lanes][k]: words with the codes of registers 0 and 1, at bits 0 and 6 (and 16
//   higher), and the lower four bits of register 3's.
// - [4 pieces][32 lanes][k / 2]: words with register 2's codes, and the upper bits of register 3's,
//   at bits 8 (k % 2) and 6 higher.
// - [4 pieces][8 (g)][k]: converted scales times 2^kUp, BF16 of rows g and g + 8.
struct Q6_K : Whole {
  static constexpr Code kCode = Code::kQ6_K;
  static constexpr int kUnit = 256, kVectors = 2, kScales = 2048 + 1024, kTileBytes = kScales + 512;
  static constexpr int kBlock = 256, kBytes = 210, kHeadAt = 192, kHeadBytes = 18;
  using Scales = Scaled<5>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    const uint2 more = From::get(reinterpret_cast<const uint2*>(tile + 2048) + piece * 32 + lane);
    p.q[1].x = more.x;
    p.q[1].y = more.y;
    p.s = From::get(reinterpret_cast<const uint4*>(tile + kScales) + piece * 8 + lane / 4);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    constexpr uint32_t kSix = 0x003f003f;
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    const uint32_t s[4] = {p.s.x, p.s.y, p.s.z, p.s.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t more = k < 2 ? p.q[1].x : p.q[1].y;
      const auto [g, h] = Scales::lines(s[k]);
      const uint32_t third = k % 2 == 0 ? more : more >> 8;
      const uint32_t upper = more >> (k % 2 == 0 ? 2 : 10);
      a[k] = make_uint4(g(q[k] & kSix), h(q[k] >> 6 & kSix), g(third & kSix),
                        h((q[k] >> 12 & 0x000f000f) | (upper & 0x00300030)));
    }
  }
  static __device__ uint32_t stored(const uint8_t* b, int i) {
    const int half = i / 128;
    const uint32_t low = (b[half * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
    return low | ((b[128 + half * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3) << 4;
  }
  static __device__ float scale(const uint8_t* head, int group) {
    return half_at(head + 16) * static_cast<float>(static_cast<int8_t>(head[group]));
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t, int thread) {
    uint32_t more = 0;
    for (int k = 0; k < 2; ++k) {
      const int i = thread * 2 + k, lane = thread / 2 % 32;
      uint32_t bits = 0;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n), half = n % 2 * 16;
        const int col = thread / 64 * 64 + i % 4 * 16 + operand_col(lane, n);
        if (rows[row] == nullptr) continue;
        const uint32_t v = stored(rows[row], col);
        if (n / 2 < 2) bits |= v << (half + n / 2 * 6);
        if (n / 2 == 2) more |= v << (half + k * 8);
        if (n / 2 == 3) {
          bits |= (v & 15) << (half + 12);
          more |= v >> 4 << (half + k * 8 + 6);
        }
      }
      reinterpret_cast<uint32_t*>(tile)[i] = bits;
    }
    reinterpret_cast<uint32_t*>(tile + 2048)[thread] = more;
    if (thread >= 128) return;
    const auto of = [&](const uint8_t* row) {
      return row != nullptr ? scale(row + kHeadAt, thread / 32 * 4 + thread % 4) : 0.0f;
    };
    const int g = thread / 4 % 8;
    reinterpret_cast<uint32_t*>(tile + kScales)[thread] =
        Scales::pack(of(rows[g]), of(rows[g + 8]));
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2, k = col % 64 / 16;
    const int j = (col % 16 / 8) * 2 + row / 8, place = col / 64 * 32 + lane;
    const uint32_t bits = reinterpret_cast<const uint32_t*>(tile)[place * 4 + k] >> (col % 2 * 16);
    const uint32_t more = reinterpret_cast<const uint32_t*>(tile + 2048)[place * 2 + k / 2] >>
                          (col % 2 * 16 + k % 2 * 8);
    const uint32_t q = j < 2    ? bits >> (j * 6) & 63
                       : j == 2 ? more & 63
                                : (bits >> 12 & 15) | (more >> 6 & 3) << 4;
    return static_cast<float>(static_cast<int>(q) - 32) * scale(heads + row * kHeadBytes, col / 16);
  }
};

}  // namespace freshet::cuda

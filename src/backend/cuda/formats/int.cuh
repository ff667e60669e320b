// INT8, and groups of INT4 with zero points, as tiles (formats.cuh).
#pragma once

#include "backend/cuda/formats/gguf_bits.cuh"

namespace freshet::cuda {

// Core matrices of 8 rows by 16 columns, 128 bytes each: [row / 8][col / 16][row % 8][col % 16],
// the layout of INT8 activations, too (api.h). A row's scale is not in its tiles: see
// int8_scales(). Dense GEMMs multiply the bytes (gemm_int8.cuh); expert GEMMs multiply BF16 values
// and scale the sums.
struct INT8 : Plain {
  static constexpr Code kCode = Code::kInt8;
  static constexpr int kUnit = kInt8Cols, kVectors = 4, kTileBytes = 2 * kInt8TileBytes;
  static constexpr int kBlock = 1, kBytes = 1, kHead = 4;
  static __host__ __device__ int place(int row, int col) {
    return row / 8 * kInt8TileBytes + col / 16 * 128 + row % 8 * 16 + col % 16;
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    for (int i = 0; i < 4; ++i) {
      const auto two = [&](int n) -> uint32_t {
        const int col = piece * 64 + i * 16 + operand_col(lane, n);
        return From::get(
            reinterpret_cast<const uint16_t*>(tile + place(operand_row(lane, n), col)));
      };
      p.q[i] = make_uint4(two(0), two(2), two(4), two(6));
    }
  }
  static __device__ float value(uint32_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
  static __device__ uint32_t two(uint32_t w) { return pack_bf16(value(w & 255), value(w >> 8)); }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
      a[i] = make_uint4(two(p.q[i].x), two(p.q[i].y), two(p.q[i].z), two(p.q[i].w));
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < kTileBytes; i += 256) {
      const int row = i / 1024 * 8 + i % 128 / 16, col = i % 1024 / 128 * 16 + i % 16;
      tile[i] = rows[row] != nullptr && col < left ? rows[row][col] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return value(tile[place(row, col)]);
  }
};

// Dequantises d (q - z). The difference is exact in BF16; its product with the scale is rounded.
// The fma for the difference is that of Centred.
struct FromZero {
  uint32_t scale, zero;
  template <int kAt>
  __device__ __forceinline__ uint32_t of(uint32_t numbers) const {
    return mul2(fma2(numbers, power2(133 - kLow - kAt), zero), scale);
  }
  static constexpr int kLow = 16;
};
// Rows g and g + 8, whose scales share a group's words: see Int4.
struct FromZeroRows {
  FromZero g, h;
  __device__ __forceinline__ FromZeroRows(uint32_t word_g, uint32_t word_h) {
    constexpr int kLow = FromZero::kLow;
    const auto d = [](uint32_t word) { return __uint_as_float(word & 0xfffff000); };
    const uint32_t scale = mul2(pack_bf16(d(word_g), d(word_h)), power2(kLow - Whole::kDown));
    // A zero point whose bits are read as BF16 is 2^-133 times its value.
    const uint32_t zeros = __byte_perm(word_g, word_h, 0x5410) & 0x000f000f;
    const uint32_t zero = mul2(zeros, power2(133 - kLow) | kMinus);
    g = {low2(scale), low2(zero)};
    h = {high2(scale), high2(zero)};
  }
};

// Four bits as in Q4_0, [pieces][32 lanes][16 bytes], then [8 (g)][group][row half] words: the
// scale's upper 20 bits, and the zero point in the lowest four.
template <Code kOf, int kSize>
struct Int4 : Whole {
  static constexpr Code kCode = kOf;
  static constexpr int kUnit = kSize == 128 ? 128 : 64, kVectors = 1;
  static constexpr int kGroups = kUnit / kSize, kScales = kUnit / 64 * 512;
  static constexpr int kTileBytes = kScales + 16 * kGroups * 4;
  static constexpr int kBlock = kSize, kBytes = 3 + kSize / 2;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    if constexpr (kGroups == 1) {
      const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + kScales) + lane / 4);
      p.s.x = s.x;
      p.s.y = s.y;
    } else {
      p.s = From::get(reinterpret_cast<const uint4*>(tile + kScales) + lane / 4);
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const FromZeroRows rows(group == 0 ? p.s.x : p.s.z, group == 0 ? p.s.y : p.s.w);
      const FromZero &g = rows.g, &h = rows.h;
#pragma unroll
      for (int k = group * 4 / kGroups; k < (group + 1) * 4 / kGroups; ++k) {
        const uint32_t next = q[k] >> 8;
        a[k] = make_uint4(g.of<0>(q[k] & 0x000f000f), h.of<4>(q[k] & 0x00f000f0),
                          g.of<0>(next & 0x000f000f), h.of<4>(next & 0x00f000f0));
      }
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, kUnit / 64, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + col / kSize * kBytes + 3 + col % kSize / 32 * 16, col);
    });
    if (thread >= 16 * kGroups) return;
    const int row = thread / (2 * kGroups) + thread % 2 * 8, group = thread / 2 % kGroups;
    uint32_t word = 0;
    if (rows[row] != nullptr && group * kSize < left) {
      const uint8_t* of = rows[row] + group * kBytes;
      word = uint32_t{of[1]} << 24 | uint32_t{of[0]} << 16 | (of[2] & 0xf0u) << 8 | (of[2] & 15u);
    }
    reinterpret_cast<uint32_t*>(tile + kScales)[thread] = word;
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const int i = (row % 8 * kGroups + col / kSize) * 2 + row / 8;
    const uint32_t word = reinterpret_cast<const uint32_t*>(tile + kScales)[i];
    return __uint_as_float(word & 0xfffff000) *
           static_cast<float>(static_cast<int>(Nibbles::at(tile, row, col)) -
                              static_cast<int>(word & 15));
  }
};
using Int4G128 = Int4<Code::kInt4G128, 128>;
using Int4G32 = Int4<Code::kInt4G32, 32>;

}  // namespace freshet::cuda

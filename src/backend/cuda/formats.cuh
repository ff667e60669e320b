// How stored formats lie in tiles of 16 rows by kUnit columns, and how a lane decodes its share.
//
// A lane of mma.m16n8k16 multiplies rows g = lane / 4 and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9 of every 16 (t = lane % 4), so a tile keeps each lane's numbers together:
//   quants  [kUnit / 64 pieces][vectors a piece][32 lanes][16 bytes]
//   scales  [8 (g)][bytes of rows g and g + 8]
// (BF16 has core matrices instead.)
// `Format::load` fetches a lane's part of 64 columns, `decode` turns it into four A operands.
// Formats with scales decode to whole numbers, which BF16 holds exactly; sums over a group of
// kGroup operands are then multiplied by the group's scale. kGroup 0: operands are values. kMins: a
// unit is eight groups, each with a least value, which counts as often as its activations add up
// to: one more operand for the unit, whose other side are these sums, in two BF16 numbers each.
// Packing moves bits and changes none.
#pragma once

#include "backend/cuda/common.cuh"

namespace freshet::cuda {

__device__ __forceinline__ float half_at(const uint8_t* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}
__device__ __forceinline__ float half_bits(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Row (0..15) and column (0..15) of number i (0..7) of a lane's operand.
__host__ __device__ __forceinline__ int operand_row(int lane, int i) {
  return lane / 4 + (i / 2 % 2) * 8;
}
__host__ __device__ __forceinline__ int operand_col(int lane, int i) {
  return lane % 4 * 2 + (i / 4) * 8 + i % 2;
}

// How a lane fetches: weights from memory are read once and never change.
struct FromMemory {
  static constexpr bool kShared = false;
  template <class T>
  static __device__ __forceinline__ T get(const T* p) {
    return __ldg(p);
  }
};
struct FromShared {
  static constexpr bool kShared = true;
  template <class T>
  static __device__ __forceinline__ T get(const T* p) {
    return *p;
  }
};

struct Piece {  // what a lane holds of 64 columns, before decoding
  uint4 q[4];   // as many as the format has
  uint4 s;      // scales
};

// Scales of a group for rows g and g + 8.
struct Scales {
  float d0, d1;
};
// Least values of a unit: the operand's two registers (its other two are the same), and the factors
// of rows g and g + 8 in F16.
struct Least {
  uint32_t a0, a1, d;
};
__device__ __forceinline__ uint32_t sub2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 v = __hsub2(reinterpret_cast<const __nv_bfloat162&>(a),
                                   reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 v = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a),
                                   reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(v);
}

struct Plain {
  static constexpr int kGroup = 0;
  static constexpr bool kMins = false;
  static __device__ Scales scales(const Piece&, int, int) { return {}; }
};

// Core matrices of 8 rows by 8 columns, 128 bytes each: [row / 8][col / 8][row % 8][col % 8]. That
// is how wgmma takes them from shared memory, and ldmatrix makes a lane's operand of four.
struct BF16 : Plain {
  static constexpr Code kCode = Code::kBF16;
  static constexpr int kUnit = 64, kVectors = 4, kTileBytes = 16 * 64 * 2, kBlock = 1, kBytes = 2;
  static __host__ __device__ int place(int row, int col) {  // in elements
    return (row / 8 * 8 + col / 8) * 64 + row % 8 * 8 + col % 8;
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    const auto* numbers = reinterpret_cast<const uint16_t*>(tile);
    for (int i = 0; i < 4; ++i) {
      if constexpr (From::kShared) {
        uint32_t a[4];
        ldmatrix4(a, numbers + place(lane % 16, i * 16 + lane / 16 * 8));
        p.q[i] = make_uint4(a[0], a[1], a[2], a[3]);
      } else {
        const auto two = [&](int n) {
          return From::get(reinterpret_cast<const uint32_t*>(
              numbers + place(operand_row(lane, n), i * 16 + operand_col(lane, n))));
        };
        p.q[i] = make_uint4(two(0), two(2), two(4), two(6));
      }
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) a[i] = p.q[i];
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int row = i / 512 * 8 + i / 8 % 8, col = i / 64 % 8 * 8 + i % 8;
      reinterpret_cast<uint16_t*>(tile)[i] = rows[row] != nullptr && col < left
                                                 ? reinterpret_cast<const uint16_t*>(rows[row])[col]
                                                 : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return __uint_as_float(uint32_t{reinterpret_cast<const uint16_t*>(tile)[place(row, col)]}
                           << 16);
  }
};

// Tiles of 8 rows as tokens have them, [16 columns][row][16] and then [row] scales; two are a tile
// of the kernels that multiply in BF16, which holds E4M3 exactly. Behind all tiles stands what the
// scales of each 64 rows have in common.
struct FP8 {
  enum Scaled : int32_t { kOfBlocks, kOfSteps, kOfRows };  // nothing; all rows; all columns
  static constexpr Code kCode = Code::kFP8;
  static constexpr int kUnit = 128, kVectors = 4, kTileBytes = 2 * 8 * (128 + 4);
  static constexpr int kBlock = 128, kBytes = 132;
  static constexpr int kGroup = 4;
  static constexpr bool kMins = false;
  static __host__ __device__ int place(int row, int col) {
    return row / 8 * (kTileBytes / 2) + col / 16 * 128 + row % 8 * 16 + col % 16;
  }
  static __host__ __device__ int scale_place(int row) {
    return row / 8 * (kTileBytes / 2) + 1024 + row % 8 * 4;
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    for (int i = 0; i < 4; ++i) {
      const auto two = [&](int n) {
        const int col = piece * 64 + i * 16 + operand_col(lane, n);
        return From::get(
            reinterpret_cast<const uint16_t*>(tile + place(operand_row(lane, n), col)));
      };
      p.q[i] = make_uint4(two(0), two(2), two(4), two(6));
    }
    const auto scale = [&](int row) {
      return From::get(reinterpret_cast<const uint32_t*>(tile + scale_place(row)));
    };
    p.s.x = scale(lane / 4);
    p.s.y = scale(lane / 4 + 8);
  }
  // Exponent and mantissa in their places of an F16 are the number times 2^-8.
  static __device__ float value(uint32_t code) {
    return half_bits((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f;
  }
  static __device__ uint32_t two(uint32_t w) { return pack_bf16(value(w & 255), value(w >> 8)); }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
      a[i] = make_uint4(two(p.q[i].x), two(p.q[i].y), two(p.q[i].z), two(p.q[i].w));
    }
  }
  static __device__ Scales scales(const Piece& p, int, int) {
    return {__uint_as_float(p.s.x), __uint_as_float(p.s.y)};
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t, int thread) {
    for (int i = thread; i < 16 * 128; i += 256) {
      const int row = i / 1024 * 8 + i % 128 / 16, col = i % 1024 / 128 * 16 + i % 16;
      tile[place(row, col)] = rows[row] != nullptr ? rows[row][col] : 0;
    }
    if (thread < 64) {
      const uint8_t* row = rows[thread / 4];
      tile[scale_place(thread / 4) + thread % 4] = row != nullptr ? row[128 + thread % 4] : 0;
    }
  }
  static __host__ __device__ int64_t tiles_bytes(int64_t rows, int64_t cols) {
    return (rows + 63) / 64 * 4 * (cols / kUnit) * kTileBytes;
  }
  static __host__ __device__ const int32_t* scaled_at(const uint8_t* packed, int64_t rows,
                                                      int64_t cols) {
    return reinterpret_cast<const int32_t*>(packed + tiles_bytes(rows, cols));
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return value(tile[place(row, col)]) *
           *reinterpret_cast<const float*>(tile + scale_place(row));
  }
};

struct F16 : Plain {
  static constexpr Code kCode = Code::kF16;
  static constexpr int kUnit = 64, kVectors = 4, kTileBytes = 16 * 64 * 2, kBlock = 1, kBytes = 2;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    for (int i = 0; i < 4; ++i)
      p.q[i] = From::get(reinterpret_cast<const uint4*>(tile) + i * 32 + lane);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
      a[i] = make_uint4(two(p.q[i].x), two(p.q[i].y), two(p.q[i].z), two(p.q[i].w));
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int k = i / 256, lane = i / 8 % 32, n = i % 8;
      const int col = k * 16 + operand_col(lane, n);
      const uint8_t* row = rows[operand_row(lane, n)];
      reinterpret_cast<uint16_t*>(tile)[i] =
          row != nullptr && col < left ? reinterpret_cast<const uint16_t*>(row)[col] : 0;
    }
  }
  static __device__ uint32_t two(uint32_t w) {
    return pack_bf16(half_bits(w & 0xffff), half_bits(w >> 16));
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2, n = (col % 16 / 8) * 4 + (row / 8) * 2 + col % 2;
    return half_at(tile + 2 * (col / 16 * 256 + lane * 8 + n));
  }
};

// Rows of 64 numbers one after the other. Dense products compute with F32 itself (products.cu);
// experts' are rounded to BF16 as they arrive.
struct F32 : Plain {
  static constexpr Code kCode = Code::kF32;
  static constexpr int kUnit = 64, kVectors = 8, kTileBytes = 16 * 64 * 4, kBlock = 1, kBytes = 4;
  template <class From>
  static __device__ uint32_t two(const uint8_t* tile, int row, int col) {
    const float2 v = From::get(reinterpret_cast<const float2*>(tile) + (row * 64 + col) / 2);
    return pack_bf16(v.x, v.y);
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    const int g = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      p.q[i] =
          make_uint4(two<From>(tile, g, i * 16 + c), two<From>(tile, g + 8, i * 16 + c),
                     two<From>(tile, g, i * 16 + c + 8), two<From>(tile, g + 8, i * 16 + c + 8));
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) a[i] = p.q[i];
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const uint8_t* row = rows[i / 64];
      const int col = i % 64;
      reinterpret_cast<float*>(tile)[i] =
          row != nullptr && col < left ? reinterpret_cast<const float*>(row)[col] : 0.0f;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return reinterpret_cast<const float*>(tile)[row * 64 + col];
  }
};

// The byte of number (row, col) of a 64-column piece whose lanes hold a byte a number.
__host__ __device__ __forceinline__ int byte_place(int row, int col) {
  const int k = col / 16, lane = row % 8 * 4 + col % 8 / 2;
  const int n = (col % 16 / 8) * 4 + (row / 8) * 2 + col % 2;
  return (k / 2) * 512 + lane * 16 + (k % 2) * 8 + n;
}
// The same for 4 bits a number: byte and half. A lane's 32 bits are eight numbers of 16 columns;
// number n stands at bit 16 (n % 2) + 4 (n / 2), so that (bits >> 4 j) & 0x000f000f are neighbours.
__host__ __device__ __forceinline__ int nibble_bit(int row, int col) {
  const int k = col / 16, lane = row % 8 * 4 + col % 8 / 2;
  const int j = (col % 16 / 8) * 2 + row / 8;
  return (lane * 16 + k * 4) * 8 + (col % 2) * 16 + j * 4;
}

struct Q8_0 {
  static constexpr Code kCode = Code::kQ8_0;
  static constexpr int kUnit = 64, kVectors = 2, kTileBytes = 16 * 64 + 64, kBlock = 32,
                       kBytes = 34;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    for (int i = 0; i < 2; ++i)
      p.q[i] = From::get(reinterpret_cast<const uint4*>(tile) + i * 32 + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 1024) + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  static constexpr int kGroup = 2;
  static constexpr bool kMins = false;
  // Bytes first and first + 1 of w. Under the exponent of 128 their lower seven bits add
  // themselves, and the upper one, which counts -128, makes 256 of 128: the difference is the
  // number.
  static __device__ uint32_t two(uint32_t w, int first) {
    const uint32_t both = __byte_perm(w, 0x43434343, 0x4140 + first * 0x0101);
    return sub2(both & 0xff7fff7f, both & 0xff80ff80);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int k = 0; k < 4; ++k) {
      const uint32_t low = k % 2 == 0 ? p.q[k / 2].x : p.q[k / 2].z;
      const uint32_t high = k % 2 == 0 ? p.q[k / 2].y : p.q[k / 2].w;
      a[k] = make_uint4(two(low, 0), two(low, 2), two(high, 0), two(high, 2));
    }
  }
  static __device__ Scales scales(const Piece& p, int, int group) {
    const uint32_t s = group == 0 ? p.s.x : p.s.y;
    return {half_bits(s & 0xffff), half_bits(s >> 16)};
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int row = i / 64, col = i % 64;
      const bool real = rows[row] != nullptr && col < left;
      tile[byte_place(row, col)] = real ? rows[row][col / 32 * 34 + 2 + col % 32] : 0;
    }
    if (thread < 32) pack_scale(tile + 1024, rows, left, thread, 34);
  }
  // Scales of 16 bits: [8 (g)][block][row half].
  static __device__ void pack_scale(uint8_t* to, const uint8_t* const* rows, int64_t left, int i,
                                    int block_bytes) {
    const int g = i / 4, block = i / 2 % 2, row = g + i % 2 * 8;
    const bool real = rows[row] != nullptr && block * 32 < left;
    to[2 * i] = real ? rows[row][block * block_bytes] : 0;
    to[2 * i + 1] = real ? rows[row][block * block_bytes + 1] : 0;
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const float d = half_at(tile + 1024 + 2 * (row % 8 * 4 + col / 32 * 2 + row / 8));
    return static_cast<float>(static_cast<int8_t>(tile[byte_place(row, col)])) * d;
  }
};

// Two numbers at bits 0..3 and 16..19 of w, plus 128: 0x4300 | q is the BF16 number 128 + q. One
// instruction, which the compiler makes two of.
__device__ __forceinline__ uint32_t two_nibbles(uint32_t w) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "r"(0x000f000f), "r"(0x43004300));
  return v;
}
constexpr uint32_t k128 = 0x43004300, k136 = 0x43084308, k160 = 0x43204320;  // twice, in BF16

struct Q4_0 {
  static constexpr Code kCode = Code::kQ4_0;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 64, kBlock = 32, kBytes = 18;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 512) + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  static constexpr int kGroup = 2;
  static constexpr bool kMins = false;
  static __device__ uint32_t two(uint32_t w) { return sub2(two_nibbles(w), k136); }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      a[k] = make_uint4(two(q[k]), two(q[k] >> 4), two(q[k] >> 8), two(q[k] >> 12));
    }
  }
  static __device__ Scales scales(const Piece& p, int piece, int group) {
    return Q8_0::scales(p, piece, group);
  }
  static __device__ int stored(const uint8_t* block, int col) {  // of 32
    return (block[2 + col % 16] >> (col / 16 * 4)) & 15;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    if (thread < 128) {  // 4 bytes each: eight numbers of 16 columns
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
    if (thread < 32) Q8_0::pack_scale(tile + 512, rows, left, thread, kBytes);
  }
  static __device__ int quant(const uint8_t* tile, int row, int col) {
    const int bit = nibble_bit(row, col);
    return (reinterpret_cast<const uint32_t*>(tile)[bit / 32] >> (bit % 32)) & 15;
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const float d = half_at(tile + 512 + 2 * (row % 8 * 4 + col / 32 * 2 + row / 8));
    return static_cast<float>(quant(tile, row, col) - 8) * d;
  }
};

struct MXFP4 {
  static constexpr Code kCode = Code::kMXFP4;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 32, kBlock = 32, kBytes = 17;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.s.x = From::get(reinterpret_cast<const uint32_t*>(tile + 512) + lane / 4);
  }
  // The code's value doubled, times half a power of two.
  static __device__ float value(uint32_t code, float d) {
    const uint32_t m = code & 7;
    const float v = static_cast<float>(m < 4 ? m : m < 6 ? m * 2 - 4 : m * 4 - 16);
    return (code & 8 ? -v : v) * d;
  }
  static __device__ float scale(uint32_t e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  static constexpr int kGroup = 2;
  static constexpr bool kMins = false;
  // A code's exponent and mantissa in their places are the BF16 number value 2^-126; times 2^127,
  // since values are kept doubled.
  static __device__ uint32_t two(uint32_t w) {
    return mul2(((w & 0x00070007) << 6) | ((w & 0x00080008) << 12), 0x7f007f00);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    for (int k = 0; k < 4; ++k) {
      a[k] = make_uint4(two(q[k]), two(q[k] >> 4), two(q[k] >> 8), two(q[k] >> 12));
    }
  }
  static __device__ Scales scales(const Piece& p, int, int group) {
    const uint32_t s = p.s.x >> (group * 16);
    return {scale(s & 255), scale((s >> 8) & 255)};
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
        bits |= code << (n % 2 * 16 + n / 2 % 4 * 4);
      }
      reinterpret_cast<uint32_t*>(tile)[lane * 4 + k] = bits;
    }
    if (thread < 32) {
      const int g = thread / 4, block = thread / 2 % 2, row = g + thread % 2 * 8;
      const bool real = rows[row] != nullptr && block * 32 < left;
      tile[512 + thread] = real ? rows[row][block * kBytes] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const float d = scale(tile[512 + row % 8 * 4 + col / 32 * 2 + row / 8]);
    return value(static_cast<uint32_t>(Q4_0::quant(tile, row, col)), d);
  }
};

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
    const int q = Q4_0::quant(tile + col / 64 * 512, row, col % 64);
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

// Calls body with the format's struct; false where there is none.
template <class Body>
bool with_format(Code code, const Body& body) {
  switch (code) {
    case Code::kF32:
      body(F32{});
      return true;
    case Code::kF16:
      body(F16{});
      return true;
    case Code::kBF16:
      body(BF16{});
      return true;
    case Code::kFP8:
      body(FP8{});
      return true;
    case Code::kQ8_0:
      body(Q8_0{});
      return true;
    case Code::kQ4_0:
      body(Q4_0{});
      return true;
    case Code::kQ4_K:
      body(Q4_K{});
      return true;
    case Code::kQ6_K:
      body(Q6_K{});
      return true;
    case Code::kMXFP4:
      body(MXFP4{});
      return true;
    case Code::kCount:
      break;
  }
  return false;
}

// So many tiles of rows lie side by side, a unit of columns after the other: what a block of
// products_wgmma.cu takes of BF16 at once is one copy.
template <class F>
inline constexpr int kPanelTiles = 1;
template <>
inline constexpr int kPanelTiles<BF16> = 8;
template <>
inline constexpr int kPanelTiles<FP8> = 4;

// From a tile to the one to the right of it.
template <class F>
inline constexpr int64_t kUnitStep = int64_t{kPanelTiles<F>} * F::kTileBytes;

// Where a tile of rows begins, and how many bytes `tiles` of them take.
template <class F>
__host__ __device__ __forceinline__ int64_t tile_at(int64_t tile, int64_t cols) {
  const int64_t units = (cols + F::kUnit - 1) / F::kUnit;
  return tile / kPanelTiles<F> * units * kUnitStep<F> + tile % kPanelTiles<F> * F::kTileBytes;
}
template <class F>
__host__ __device__ __forceinline__ int64_t tiles_bytes(int64_t tiles, int64_t cols) {
  return tile_at<F>((tiles + kPanelTiles<F> - 1) / kPanelTiles<F> * kPanelTiles<F>, cols);
}

}  // namespace freshet::cuda

// What storage formats share: a lane's places in a tile (formats.cuh), and bits made numbers.
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

// Two numbers at bits 0..3 and 16..19 of w, plus 128: 0x4300 | q is the BF16 number 128 + q. One
// instruction, which the compiler makes two of.
__device__ __forceinline__ uint32_t two_nibbles(uint32_t w) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w), "r"(0x000f000f), "r"(0x43004300));
  return v;
}
constexpr uint32_t k128 = 0x43004300, k136 = 0x43084308, k160 = 0x43204320;  // twice, in BF16

}  // namespace freshet::cuda

// Shared by the weight formats: a lane's positions in a tile (formats.cuh), and conversion of codes
// to values.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

__device__ __forceinline__ float half_at(const uint8_t* p) {
  return __half2float(*reinterpret_cast<const __half*>(p));
}
__device__ __forceinline__ float half_bits(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Row (0..15) and column (0..15) of element i (0..7) of a lane's operand.
__host__ __device__ __forceinline__ int operand_row(int lane, int i) {
  return lane / 4 + (i / 2 % 2) * 8;
}
__host__ __device__ __forceinline__ int operand_col(int lane, int i) {
  return lane % 4 * 2 + (i / 4) * 8 + i % 2;
}

// How a lane loads weights: from global memory, where they are read once and never change, or from
// shared memory.
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

struct Piece {  // a lane's share of 64 columns, before decoding
  uint4 q[4];   // as many as the format has
  uint4 s;      // scales
};

// Scales of a group, for rows g and g + 8.
struct Scales {
  float d0, d1;
};
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 v = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a),
                                   reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(v);
}

// a b + c, rounded once.
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  const __nv_bfloat162 v = __hfma2(reinterpret_cast<const __nv_bfloat162&>(a),
                                   reinterpret_cast<const __nv_bfloat162&>(b),
                                   reinterpret_cast<const __nv_bfloat162&>(c));
  return reinterpret_cast<const uint32_t&>(v);
}
// One half of a register, duplicated: an operand of fma2 and mul2 at no extra instruction.
__device__ __forceinline__ uint32_t low2(uint32_t v) {
  const __nv_bfloat162 of = __low2bfloat162(reinterpret_cast<const __nv_bfloat162&>(v));
  return reinterpret_cast<const uint32_t&>(of);
}
__device__ __forceinline__ uint32_t high2(uint32_t v) {
  const __nv_bfloat162 of = __high2bfloat162(reinterpret_cast<const __nv_bfloat162&>(v));
  return reinterpret_cast<const uint32_t&>(of);
}
// 2^e twice, in BF16.
__host__ __device__ constexpr uint32_t power2(int e) {
  return (e < -126 ? 1u << (e + 133) : static_cast<uint32_t>(e + 127) << 7) * 0x00010001u;
}
constexpr uint32_t kMinus = 0x80008000;

struct Plain {
  static constexpr int kGroup = 0;
  static constexpr int kHead = 0;  // bytes at the start of a stored row
  static constexpr float kUp = 1.0f;
  static __device__ Scales scales(const Piece&, int, int) { return {}; }
};

// Formats of integers with scales. The lowest eight bits of a half register, read as BF16, are
// 2^-133 times the integer that they hold, so one fma turns two integers into values; the only
// other rounding is that of the scale. Values are stored times 2^-kDown to leave room for the
// largest scale; kUp restores sums. Both are exact.
struct Whole : Plain {
  static constexpr int kDown = 29;
  static constexpr float kUp = 536870912.0f;
};

// value = code * scale + add.
struct Line {
  uint32_t scale, add;
  __device__ __forceinline__ uint32_t operator()(uint32_t numbers) const {
    return fma2(numbers, scale, add);
  }
};
// Rows g and g + 8, which share registers.
struct Lines {
  Line g, h;
  __device__ __forceinline__ const Line& of(int j) const { return j % 2 == 0 ? g : h; }
};
// (code - 2^kMiddle) d, for codes that begin at bit kAt, or kAtH for row g + 8. Scales are
// converted when weights are packed: BF16 of both rows, including the missing power of two.
template <int kMiddle, int kAt = 0, int kAtH = kAt>
struct Scaled {
  static constexpr int kUp = 133 - Whole::kDown;
  static __device__ uint32_t pack(float dg, float dh) {
    return mul2(pack_bf16(dg, dh),
                (power2(kUp - kAt) & 0xffff) | (power2(kUp - kAtH) & 0xffff0000));
  }
  static __device__ __forceinline__ Lines lines(uint32_t scales) {
    constexpr uint32_t kMiddles =
        (power2(kMiddle + kAt - 133) & 0xffff) | (power2(kMiddle + kAtH - 133) & 0xffff0000);
    const uint32_t add = mul2(scales, kMiddles | kMinus);
    return {{low2(scales), low2(add)}, {high2(scales), high2(add)}};
  }
};

// code * d - minimum, computed as (code - 2^kMiddle) d plus the value at the middle, which has a
// smaller rounding error.
template <int kMiddle>
struct Centred {
  uint32_t scale, add;
  template <int kAt>
  __device__ __forceinline__ uint32_t of(uint32_t numbers) const {
    return fma2(fma2(numbers, power2(133 - kLow - kAt), power2(kMiddle - kLow) | kMinus), scale,
                add);
  }
  static constexpr int kLow = 16;  // powers of two that fit
};
// Rows g and g + 8. Scales are multiplied by kScaleBy (2^kScaleBits), minima by kLeastBy.
template <int kMiddle>
struct CentredRows {
  static constexpr int kScaleBits = -13, kLeastBits = -29;
  static constexpr float kScaleBy = 0x1p-13f, kLeastBy = 0x1p-29f;
  Centred<kMiddle> g, h;
  __device__ __forceinline__ CentredRows(float dg, float least_g, float dh, float least_h) {
    static_assert(Centred<kMiddle>::kLow - Whole::kDown == -13 && Whole::kDown == 29);
    constexpr float kMid = static_cast<float>(1 << kMiddle) * 0x1p-16f;
    const uint32_t scale = pack_bf16(dg, dh);
    const uint32_t add = pack_bf16(__fmaf_rn(kMid, dg, -least_g), __fmaf_rn(kMid, dh, -least_h));
    g = {low2(scale), low2(add)};
    h = {high2(scale), high2(add)};
  }
};

// The byte of element (row, col) of a 64-column piece whose lanes hold one byte per element.
__host__ __device__ __forceinline__ int byte_place(int row, int col) {
  const int k = col / 16, lane = row % 8 * 4 + col % 8 / 2;
  const int n = (col % 16 / 8) * 4 + (row / 8) * 2 + col % 2;
  return (k / 2) * 512 + lane * 16 + (k % 2) * 8 + n;
}
// The same for four bits per element: the bit position. A lane's 32 bits are eight codes of 16
// columns; code n is at bit 16 (n % 2) + 4 (n / 2), so that (bits >> 4 j) & 0x000f000f are adjacent
// columns, and bits 4..7 of a half belong to row g + 8 if bits 0..3 belong to row g.
__host__ __device__ __forceinline__ int nibble_bit(int row, int col) {
  const int k = col / 16, lane = row % 8 * 4 + col % 8 / 2;
  const int j = (col % 16 / 8) * 2 + row / 8;
  return (lane * 16 + k * 4) * 8 + (col % 2) * 16 + j * 4;
}

}  // namespace freshet::cuda

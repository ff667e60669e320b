// Encoders of activation rows; layouts in matmul_layout.h. The same
// bits on every instruction set: each step is exact or rounds once.
#pragma once

#include "backend/cpu/float_bits.inl"
#include "backend/cpu/matmul_layout.h"

namespace freshet::cpu {
namespace {

// Sixteen numbers from x, or fewer followed by zeros.
FRESHET_INLINE F32 load_part(const float* x, int64_t left) {
  if (left >= 16) return load_f(x);
  float part[16] = {};
  for (int64_t i = 0; i < left; ++i) part[i] = x[i];
  return load_f(part);
}

// Below this a block counts as zero: the inverse of its scale would overflow.
inline constexpr float kSmallest = 1e-30f;

struct BlockScale {
  float d;
  float inverse;  // 0: all numbers of the block are 0
};

// The scale that takes the largest magnitude to 127. `top` holds that magnitude's bits, compared as
// a whole number so that a NaN counts as largest: it, and infinity, make the block's scale NaN.
FRESHET_INLINE BlockScale block_scale(int32_t top) {
  if (top >= kInfinityBits) {
    return {f32_from_bits(0x7fc00000), 0.0f};
  }
  const float largest = f32_from_bits(top);
  if (largest < kSmallest) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

// To the nearest BF16, ties to even; the bits in the low half. A NaN stays one.
FRESHET_INLINE I32 to_bf16(F32 x) {
  const I32 u = bits_i(x), top = shr(u, 16);
  const I32 rounded = shr(add_i(add_i(u, set_i(0x7fff)), and_i(top, set_i(1))), 16);
  const I32 nan = sar(sub_i(set_i(kInfinityBits), magnitude_bits(x)), 31);
  return xor_i(rounded, and_i(xor_i(rounded, or_i(top, set_i(0x40))), nan));
}

void encode_bf16(const float* x, int64_t cols, uint8_t* out) {
  const Bf16Layout l = bf16_layout(cols);
  for (int64_t k = 0; k < padded_cols(cols); k += 16) {
    const F32 v = load_part(x + k, cols - k);
    const I32 coarse = to_bf16(v);
    const I32 fine = to_bf16(sub_f(v, bits_f(shl(coarse, 16))));
    store_u16(out + k * 2, swap_middle(coarse));
    store_u16(out + l.fine + k * 2, swap_middle(fine));
  }
}

// Sixteen numbers in two planes.
struct Planes {
  I32 coarse;
  I32 fine;
};
// A zero inverse asks for zeros, whatever x holds.
FRESHET_INLINE Planes quantize(F32 x, float inverse) {
  if (inverse == 0.0f) return {zero_i(), zero_i()};
  const F32 scaled = mul_f(x, set_f(inverse));
  const I32 coarse = round_i(scaled);
  return {coarse, round_i(mul_f(sub_f(scaled, to_f(coarse)), set_f(kFineSteps)))};
}

template <class T>
FRESHET_INLINE void put(uint8_t* at, T v) {
  std::memcpy(at, &v, sizeof v);
}

FRESHET_INLINE void put_sums(Q8x256Record& r, const int (&sum)[16]) {
  for (int g = 0; g < 16; ++g) {
    const int place = g / 4 * 4 + g % 2 * 2 + g % 4 / 2;  // (0, 2), (1, 3) of each four
    r.sum16[place] = static_cast<int16_t>(sum[g]);
    if (g < 8) r.sum32[place] = static_cast<int16_t>(sum[2 * g] + sum[2 * g + 1]);
  }
}

void encode_q8x256(const float* x, int64_t cols, uint8_t* out) {
  const Q8x256Layout l = q8x256_layout(cols);
  for (int64_t b = 0; b < blocks_of(cols, 256); ++b) {
    const float* const from = x + b * 256;
    const int64_t left = cols - b * 256;
    I32 top = zero_i();
    for (int i = 0; i < 256; i += 16) {
      top = max_i(top, magnitude_bits(load_part(from + i, left - i)));
    }
    const BlockScale scale = block_scale(reduce_max(top));
    int sum[16], sum_fine[16];
    for (int g = 0; g < 16; ++g) {
      const Planes q = quantize(load_part(from + g * 16, left - g * 16), scale.inverse);
      store_i8(out + b * 256 + g * 16, q.coarse);
      store_i8(out + l.fine + b * 256 + g * 16, q.fine);
      sum[g] = reduce_add(q.coarse);
      sum_fine[g] = reduce_add(q.fine);
    }
    Q8x256Record r[2] = {};
    r[0].d = scale.d;
    r[0].minus_d = -scale.d;
    r[1].d = scale.d / kFineSteps;
    r[1].minus_d = -r[1].d;
    put_sums(r[0], sum);
    put_sums(r[1], sum_fine);
    put(out + l.records + b * 2 * kLine, r[0]);
    put(out + l.records + b * 2 * kLine + kLine, r[1]);
  }
}

}  // namespace
}  // namespace freshet::cpu

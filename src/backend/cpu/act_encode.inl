// Encoders of activation rows; matmul_layout.h has the layouts. All instruction sets are
// bit-identical: each step is exact or rounds once.
#pragma once

#include "backend/cpu/float_bits.inl"
#include "backend/cpu/matmul_layout.h"

namespace freshet::cpu {
namespace {

// Loads sixteen values from x, or fewer followed by zeros.
FRESHET_INLINE F32 load_part(const float* x, int64_t left) {
  if (left >= 16) return load_f(x);
  float part[16] = {};
  for (int64_t i = 0; i < left; ++i) part[i] = x[i];
  return load_f(part);
}

// A block whose largest magnitude is below this counts as zero: the inverse of its scale would
// overflow.
inline constexpr float kSmallest = 1e-30f;

struct BlockScale {
  float d;
  float inverse;  // 0: all values of the block are 0
};

// The scale that maps the largest magnitude to 127. `top` holds the bits of that magnitude. They
// are compared as integers, so a NaN counts as the largest: NaN and infinity make the block's scale
// NaN.
FRESHET_INLINE BlockScale block_scale(int32_t top) {
  if (top >= kInfinityBits) {
    return {f32_from_bits(0x7fc00000), 0.0f};
  }
  const float largest = f32_from_bits(top);
  if (largest < kSmallest) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

// Rounds to the nearest BF16, ties to even; the bits are in the lower half. NaN stays NaN.
FRESHET_INLINE I32 to_bf16(F32 x) {
  const I32 u = bits_i(x), top = shr(u, 16);
  const I32 rounded = shr(add_i(add_i(u, set_i(0x7fff)), and_i(top, set_i(1))), 16);
  const I32 nan = sar(sub_i(set_i(kInfinityBits), magnitude_bits(x)), 31);
  return xor_i(rounded, and_i(xor_i(rounded, or_i(top, set_i(0x40))), nan));
}

void encode_bf16(const float* x, int64_t cols, int64_t first, int64_t last, bool fine,
                 uint8_t* out) {
  const Bf16Layout l = bf16_layout(cols);
  for (int64_t k = first; k < padded_cols(last); k += 16) {
    const F32 v = load_part(x + k - first, last - k);
    const I32 coarse = to_bf16(v);
    store_u16(out + k * 2, swap_middle(coarse));
    if (!fine) continue;
    const I32 rest = to_bf16(sub_f(v, bits_f(shl(coarse, 16))));
    store_u16(out + l.fine + k * 2, swap_middle(rest));
  }
}

template <class T>
FRESHET_INLINE void put(uint8_t* at, T v) {
  std::memcpy(at, &v, sizeof v);
}

// Stores the lower halves of eight values.
FRESHET_INLINE void store_eight_u16(uint8_t* at, I32 v) {
#if defined(__AVX512VL__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                   _mm256_cvtepi32_epi16(_mm512_castsi512_si256(v)));
#else
  alignas(64) uint8_t all[2 * 16];
  store_u16(all, v);
  std::memcpy(at, all, 16);
#endif
}
// Stores the sums of a block's groups of 32 (the first eight values) times d as BF16, ties away
// from zero.
FRESHET_INLINE void put_sums(I32 sums, float d, uint8_t* at) {
  const F32 v = mul_f(to_f(sums), set_f(d));
  store_eight_u16(at, shr(add_i(bits_i(v), set_i(0x8000)), 16));
}

// Writes the record of a block whose bytes are already written.
FRESHET_INLINE void put_record(const uint8_t* bytes, float d, uint8_t* at,
                               uint8_t* sums = nullptr) {
  int sum[16];
  sums_of_16(bytes, sum);
  if (sums != nullptr) {
    int32_t of_32[16] = {};
    for (int g = 0; g < 8; ++g) of_32[g] = sum[2 * g] + sum[2 * g + 1];
    put_sums(load_i(of_32), d, sums);
  }
  Q8x256Record r = {};
  r.d = d;
  r.minus_d = -d;
  for (int g = 0; g < 16; ++g) {
    const int place = g / 4 * 4 + g % 2 * 2 + g % 4 / 2;  // (0, 2), (1, 3) of each four
    r.sum16[place] = static_cast<int16_t>(sum[g]);
    if (g < 8) r.sum32[place] = static_cast<int16_t>(sum[2 * g] + sum[2 * g + 1]);
  }
  put(at, r);
}

// Encodes a block of `left` values, or of 256. A zero inverse writes zeros, whatever x holds.
template <bool kFine>
FRESHET_INLINE void encode_block(const float* x, int64_t left, uint8_t* coarse, uint8_t* fine,
                                 uint8_t* records, uint8_t* sums) {
  I32 top = zero_i();
  for (int i = 0; i < 256; i += 16) top = max_i(top, magnitude_bits(load_part(x + i, left - i)));
  const BlockScale scale = block_scale(reduce_max(top));
  for (int i = 0; i < 256; i += 16) {
    const F32 v =
        scale.inverse == 0.0f ? zero_f() : mul_f(load_part(x + i, left - i), set_f(scale.inverse));
    const I32 q = round_i(v);
    store_i8(coarse + i, q);
    if (kFine) store_i8(fine + i, round_i(mul_f(sub_f(v, to_f(q)), set_f(kFineSteps))));
  }
  put_record(coarse, scale.d, records, sums);
  if (kFine) put_record(fine, scale.d / kFineSteps, records + kLine);
}

#if defined(__AVX512BW__)
// Narrows integers that fit a byte to bytes, in order.
FRESHET_INLINE I32 as_bytes(const I32 (&q)[4]) {
  const I32 order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(
      order, _mm512_packs_epi16(_mm512_packs_epi32(q[0], q[1]), _mm512_packs_epi32(q[2], q[3])));
}

// Writes the record of a block from its bytes in registers. (Loading whole vectors that were just
// stored in parts would have to wait for the stores.)
FRESHET_INLINE void put_record(const I32 (&line)[4], float d, uint8_t* at,
                               uint8_t* sums_at = nullptr) {
  const I32 sum = sums_of_16(line);
  const I32 of_32 = add_i(sum, _mm512_shuffle_i64x2(sum, sum, 0xb1));
  if (sums_at != nullptr) {
    const I32 order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    put_sums(_mm512_permutexvar_epi32(order, of_32), d, sums_at);
  }
  // The lower halves of sums of 16; the sums of 32 are in lanes 0 and 2.
  alignas(64) static constexpr int16_t kPlaces[32] = {0,  0,  0,  0,  0,  0,  0,  0,  32, 34, 48,
                                                      50, 36, 38, 52, 54, 0,  16, 8,  24, 2,  18,
                                                      10, 26, 4,  20, 12, 28, 6,  22, 14, 30};
  const I32 sums = _mm512_maskz_permutex2var_epi16(0xffffff00, sum, load_i(kPlaces), of_32);
  const __m128i scales = _mm_castps_si128(_mm_setr_ps(d, -d, 0.0f, 0.0f));
  store_i(at, _mm512_inserti32x4(sums, scales, 0));
}

// Encodes a complete block of 256 values.
template <bool kFine>
FRESHET_INLINE void encode_whole(const float* x, uint8_t* coarse, uint8_t* fine, uint8_t* records,
                                 uint8_t* sums) {
  I32 top[4];
  FRESHET_UNROLL
  for (int i = 0; i < 4; ++i) top[i] = magnitude_bits(load_f(x + 16 * i));
  FRESHET_UNROLL
  for (int i = 4; i < 16; ++i) top[i % 4] = max_i(top[i % 4], magnitude_bits(load_f(x + 16 * i)));
  const BlockScale scale =
      block_scale(reduce_max(max_i(max_i(top[0], top[1]), max_i(top[2], top[3]))));
  if (scale.inverse == 0.0f) return encode_block<kFine>(x, 256, coarse, fine, records, sums);
  const F32 inverse = set_f(scale.inverse);
  I32 line[4], fine_line[4];
  FRESHET_UNROLL
  for (int i = 0; i < 4; ++i) {
    I32 q[4], f[4];
    FRESHET_UNROLL
    for (int j = 0; j < 4; ++j) {
      const F32 v = mul_f(load_f(x + 64 * i + 16 * j), inverse);
      q[j] = round_i(v);
      if (kFine) f[j] = round_i(mul_f(sub_f(v, to_f(q[j])), set_f(kFineSteps)));
    }
    line[i] = as_bytes(q);
    store_i(coarse + 64 * i, line[i]);
    if (!kFine) continue;
    fine_line[i] = as_bytes(f);
    store_i(fine + 64 * i, fine_line[i]);
  }
  put_record(line, scale.d, records, sums);
  if (kFine) put_record(fine_line, scale.d / kFineSteps, records + kLine);
}
#else
template <bool kFine>
FRESHET_INLINE void encode_whole(const float* x, uint8_t* coarse, uint8_t* fine, uint8_t* records,
                                 uint8_t* sums) {
  encode_block<kFine>(x, 256, coarse, fine, records, sums);
}
#endif

template <bool kFine>
FRESHET_INLINE void encode_blocks(const float* x, int64_t first, int64_t last,
                                  const Q8x256Layout& l, uint8_t* out) {
  for (int64_t k = first; k < last; k += 256, x += 256) {
    const int64_t b = k / 256;
    uint8_t* const records = out + l.records + b * 2 * kLine;
    uint8_t* const sums = out + l.sums + b * 16;
    if (last - k >= 256) {
      encode_whole<kFine>(x, out + k, out + l.fine + k, records, sums);
    } else {
      encode_block<kFine>(x, last - k, out + k, out + l.fine + k, records, sums);
    }
    if (k + 256 != l.fine) continue;
    std::memset(sums + 16, 0, static_cast<size_t>(3 - b % 4) * 16);
  }
}

void encode_q8x256(const float* x, int64_t cols, int64_t first, int64_t last, bool fine,
                   uint8_t* out) {
  const Q8x256Layout l = q8x256_layout(cols);
  if (fine) {
    encode_blocks<true>(x, first, last, l, out);
  } else {
    encode_blocks<false>(x, first, last, l, out);
  }
}

// The sum of 256 signed bytes.
FRESHET_INLINE int32_t sum_of_256(const uint8_t* bytes) {
  int32_t part[16], sum = 0;
  sums_of_16(bytes, part);
  for (const int32_t s : part) sum += s;
  return sum;
}

// Encodes a whole row at once, because its scale is that of its largest magnitude.
void encode_int8(const float* x, int64_t cols, int64_t, int64_t, bool, uint8_t* out) {
  const Int8Layout l = int8_layout(cols);
  I32 top = zero_i();
  for (int64_t k = 0; k < cols; k += 16)
    top = max_i(top, magnitude_bits(load_part(x + k, cols - k)));
  const BlockScale scale = block_scale(reduce_max(top));
  for (int64_t k = 0; k < l.record; k += 16) {
    const bool zeros = scale.inverse == 0.0f || k >= cols;
    const F32 v = zeros ? zero_f() : mul_f(load_part(x + k, cols - k), set_f(scale.inverse));
    store_i8(out + k, round_i(v));
  }
  Int8Record record{scale.d, 0};
  int64_t k = 0;
  for (; k + 256 <= l.record; k += 256) record.sum += sum_of_256(out + k);
  for (; k < l.record; ++k) record.sum += static_cast<int8_t>(out[k]);
  put(out + l.record, record);
}

}  // namespace
}  // namespace freshet::cpu

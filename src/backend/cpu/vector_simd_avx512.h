// Sixteen F32 lanes of AVX-512 (F, BW, DQ, VL), as used by the attention and vector kernel
// templates. vector_simd_avx2.h has the same names for eight lanes of AVX2.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace freshet::cpu {
namespace {

#define FRESHET_SIMD static inline __attribute__((always_inline))

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kTileRows = 8;  // rows of a register tile
  static constexpr int kDotRows = 4;   // rows of a tile of dot products with four others

  FRESHET_SIMD F zero() { return _mm512_setzero_ps(); }
  FRESHET_SIMD F set(float x) { return _mm512_set1_ps(x); }
  FRESHET_SIMD F load(const float* p) { return _mm512_loadu_ps(p); }
  FRESHET_SIMD void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  // Only the first n lanes, 0 <= n <= kLanes; loads zero the others, stores leave memory unchanged.
  FRESHET_SIMD F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  FRESHET_SIMD void store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

  FRESHET_SIMD F add(F a, F b) { return _mm512_add_ps(a, b); }
  FRESHET_SIMD F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  FRESHET_SIMD F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  FRESHET_SIMD F div(F a, F b) { return _mm512_div_ps(a, b); }
  FRESHET_SIMD F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
  FRESHET_SIMD F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  FRESHET_SIMD F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }    // a * b - c
  FRESHET_SIMD F min(F a, F b) { return _mm512_min_ps(a, b); }              // b if either is NaN
  FRESHET_SIMD F max(F a, F b) { return _mm512_max_ps(a, b); }              // b if either is NaN
  FRESHET_SIMD F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  FRESHET_SIMD F abs(F a) { return _mm512_abs_ps(a); }
  FRESHET_SIMD F copy_sign(F a, F sign) {
    const __m512i bit = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(sign), _mm512_castps_si512(a), 0xCA));
  }
  // a < b ? x : y
  FRESHET_SIMD F if_less(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  // v * 2^n for integer n, -126 <= n <= 127.
  FRESHET_SIMD F scale_by_power(F v, F n) { return _mm512_scalef_ps(v, n); }
  // Lanes [from, to) of v, else other; bounds may lie outside the lanes.
  FRESHET_SIMD F keep_range(F v, int64_t from, int64_t to, F other) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(first(to) & ~first(from)), other, v);
  }

  FRESHET_SIMD float reduce_add(F v) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return reduce_add(a);
  }
  FRESHET_SIMD float reduce_max(F v) { return _mm512_reduce_max_ps(v); }
  // {sum of a, of b, of c, of d}, each in the order of reduce_add.
  FRESHET_SIMD void reduce_add4(const F (&v)[4], float* out) {
    __m128 q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
      q[i] = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    }
    _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(q[0], q[2]), _mm_add_ps(q[1], q[3])));
  }

  FRESHET_SIMD F load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  FRESHET_SIMD F load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  // The values times 2^-8: exponent and mantissa are moved to their positions in an F16.
  FRESHET_SIMD F from_e4m3(__m128i codes) {
    const __m256i above = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    const __m256i in_f16 = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    return _mm512_cvtph_ps(_mm256_and_si256(above, in_f16));
  }
  FRESHET_SIMD F load_e4m3(const uint8_t* p) {
    return from_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  FRESHET_SIMD F load_i8(const int8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
  }
  FRESHET_SIMD F load_f16_n(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  FRESHET_SIMD F load_bf16_n(const uint16_t* p, int n) {
    const __m256i h = _mm256_maskz_loadu_epi16(first(n), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
  }
  FRESHET_SIMD F load_e4m3_n(const uint8_t* p, int n) {
    return from_e4m3(_mm_maskz_loadu_epi8(first(n), p));
  }
  FRESHET_SIMD F load_i8_n(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
  }
  FRESHET_SIMD void store_f16(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // Splits the pairs (2 i, 2 i + 1) of 32 values into even and odd ones.
  FRESHET_SIMD void load_pairs(const float* p, F& even, F& odd) {
    const F a = load(p), b = load(p + 16);
    even = _mm512_permutex2var_ps(a, pair_index(0), b);
    odd = _mm512_permutex2var_ps(a, pair_index(1), b);
  }
  FRESHET_SIMD void store_pairs(float* p, F even, F odd) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    store(p, _mm512_permutex2var_ps(even, low, odd));
    store(p + 16, _mm512_permutex2var_ps(even, high, odd));
  }

 private:
  FRESHET_SIMD __mmask16 first(int64_t n) {
    return n >= 16 ? static_cast<__mmask16>(0xffff)
                   : static_cast<__mmask16>(n <= 0 ? 0 : (1u << n) - 1);
  }
  FRESHET_SIMD float reduce_add(__m256 v) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  FRESHET_SIMD __m512i pair_index(int odd) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_add_epi32(even, _mm512_set1_epi32(odd));
  }
};

#undef FRESHET_SIMD

}  // namespace
}  // namespace freshet::cpu

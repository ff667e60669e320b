// Eight F32 lanes of AVX2 with FMA and F16C; same names as in vector_simd_avx512.h.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace freshet::cpu {
namespace {

#define FRESHET_SIMD static inline __attribute__((always_inline))

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 6;
  static constexpr int kDotRows = 2;

  FRESHET_SIMD F zero() { return _mm256_setzero_ps(); }
  FRESHET_SIMD F set(float x) { return _mm256_set1_ps(x); }
  FRESHET_SIMD F load(const float* p) { return _mm256_loadu_ps(p); }
  FRESHET_SIMD void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  FRESHET_SIMD F load_n(const float* p, int n) { return _mm256_maskload_ps(p, range(0, n)); }
  FRESHET_SIMD void store_n(float* p, F v, int n) { _mm256_maskstore_ps(p, range(0, n), v); }

  FRESHET_SIMD F add(F a, F b) { return _mm256_add_ps(a, b); }
  FRESHET_SIMD F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  FRESHET_SIMD F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  FRESHET_SIMD F div(F a, F b) { return _mm256_div_ps(a, b); }
  FRESHET_SIMD F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  FRESHET_SIMD F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  FRESHET_SIMD F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }
  FRESHET_SIMD F min(F a, F b) { return _mm256_min_ps(a, b); }
  FRESHET_SIMD F max(F a, F b) { return _mm256_max_ps(a, b); }
  FRESHET_SIMD F round(F a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  FRESHET_SIMD F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  FRESHET_SIMD F copy_sign(F a, F sign) {
    const F bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, a), _mm256_and_ps(bit, sign));
  }
  FRESHET_SIMD F if_less(F a, F b, F x, F y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  FRESHET_SIMD F scale_by_power(F v, F n) {
    const __m256i bits =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(v, _mm256_castsi256_ps(bits));
  }
  FRESHET_SIMD F keep_range(F v, int64_t from, int64_t to, F other) {
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(range(from, to)));
  }

  FRESHET_SIMD float reduce_add(F v) {
    const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  FRESHET_SIMD float reduce_max(F v) {
    const __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
  FRESHET_SIMD void reduce_add4(const F (&v)[4], float* out) {
    __m128 q[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      q[i] = _mm_add_ps(_mm256_castps256_ps128(v[i]), _mm256_extractf128_ps(v[i], 1));
    }
    _MM_TRANSPOSE4_PS(q[0], q[1], q[2], q[3]);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(q[0], q[2]), _mm_add_ps(q[1], q[3])));
  }

  FRESHET_SIMD F load_f16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  FRESHET_SIMD F load_bf16(const uint16_t* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  // The values times 2^-8: exponent and mantissa are moved to their positions in an F16.
  FRESHET_SIMD F load_e4m3(const uint8_t* p) {
    const __m128i v = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i in_f16 = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(v, 7), in_f16));
  }
  FRESHET_SIMD F load_i8(const int8_t* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  }
  // Row lengths are multiples of eight, so a partial vector is either full or empty.
  FRESHET_SIMD F load_f16_n(const uint16_t* p, int n) { return n > 0 ? load_f16(p) : zero(); }
  FRESHET_SIMD F load_bf16_n(const uint16_t* p, int n) { return n > 0 ? load_bf16(p) : zero(); }
  FRESHET_SIMD F load_e4m3_n(const uint8_t* p, int n) { return n > 0 ? load_e4m3(p) : zero(); }
  FRESHET_SIMD F load_i8_n(const int8_t* p, int n) { return n > 0 ? load_i8(p) : zero(); }
  FRESHET_SIMD void store_f16(uint16_t* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  FRESHET_SIMD void load_pairs(const float* p, F& even, F& odd) {
    const F a = load(p), b = load(p + 8);
    const F low = _mm256_permute2f128_ps(a, b, 0x20), high = _mm256_permute2f128_ps(a, b, 0x31);
    even = _mm256_shuffle_ps(low, high, 0x88);
    odd = _mm256_shuffle_ps(low, high, 0xdd);
  }
  FRESHET_SIMD void store_pairs(float* p, F even, F odd) {
    const F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    store(p, _mm256_permute2f128_ps(low, high, 0x20));
    store(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }

 private:
  FRESHET_SIMD __m256i range(int64_t from, int64_t to) {
    const int f = static_cast<int>(from < 0 ? 0 : from > 8 ? 8 : from);
    const int t = static_cast<int>(to < 0 ? 0 : to > 8 ? 8 : to);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(f), lane),
                               _mm256_cmpgt_epi32(_mm256_set1_epi32(t), lane));
  }
};

#undef FRESHET_SIMD

}  // namespace
}  // namespace freshet::cpu

// Sixteen lanes of 32 bits in two AVX2 registers. simd_scalar.h documents the names.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#define FRESHET_INLINE static inline __attribute__((always_inline))
#define FRESHET_INLINE_MEMBER inline __attribute__((always_inline))
#define FRESHET_UNROLL _Pragma("GCC unroll 64")

namespace freshet::cpu {
namespace {

struct F32 {
  __m256 a, b;
};
struct I32 {
  __m256i a, b;
};
using Scale = I32;

inline constexpr int16_t kE4M3InF16 = static_cast<int16_t>(0xbf80);
inline constexpr int kMaxTile = 4;
inline constexpr int kFloatTile = 2;
inline constexpr int kInt8Tile = 4;
#if defined(__AVXVNNI__)
inline constexpr bool kFlipSigned = true;
#else
inline constexpr bool kFlipSigned = false;
#endif

FRESHET_INLINE unsigned flush_denormals() {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  return before;
}
FRESHET_INLINE void restore_denormals(unsigned before) {
  _mm_setcsr(before);
}
FRESHET_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
FRESHET_INLINE void prefetch_near(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

FRESHET_INLINE F32 zero_f() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
FRESHET_INLINE F32 set_f(float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
FRESHET_INLINE F32 load_f(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
FRESHET_INLINE void store_f(float* p, F32 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
FRESHET_INLINE F32 add_f(F32 x, F32 y) {
  return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
FRESHET_INLINE F32 sub_f(F32 x, F32 y) {
  return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
FRESHET_INLINE F32 mul_f(F32 x, F32 y) {
  return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
FRESHET_INLINE F32 fma_f(F32 x, F32 y, F32 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
FRESHET_INLINE F32 load_f16(const void* p) {
  const __m128i* h = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
FRESHET_INLINE __m256 e4m3_above(__m128i v) {
  return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(v, 1), _mm_set1_epi16(kE4M3InF16)));
}
FRESHET_INLINE void load_e4m3(const void* p, F32& even, F32& odd) {
  const __m128i* h = static_cast<const __m128i*>(p);
  const __m128i a = _mm_loadu_si128(h), b = _mm_loadu_si128(h + 1);
  even = {e4m3_above(_mm_slli_epi16(a, 8)), e4m3_above(_mm_slli_epi16(b, 8))};
  odd = {e4m3_above(a), e4m3_above(b)};
}

FRESHET_INLINE I32 zero_i() {
  return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
FRESHET_INLINE I32 set_i(int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
FRESHET_INLINE I32 load_i(const void* p) {
  const __m256i* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
FRESHET_INLINE void store_i(void* p, I32 v) {
  __m256i* to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, v.a);
  _mm256_storeu_si256(to + 1, v.b);
}
FRESHET_INLINE I32 load_u8(const void* p) {
  const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
FRESHET_INLINE I32 load_u16(const void* p) {
  const __m128i* v = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(v)), _mm256_cvtepu16_epi32(_mm_loadu_si128(v + 1))};
}
FRESHET_INLINE I32 add_i(I32 x, I32 y) {
  return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
FRESHET_INLINE I32 sub_i(I32 x, I32 y) {
  return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
FRESHET_INLINE I32 and_i(I32 x, I32 y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
FRESHET_INLINE I32 or_i(I32 x, I32 y) {
  return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
FRESHET_INLINE I32 xor_i(I32 x, I32 y) {
  return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
FRESHET_INLINE I32 shl(I32 x, int n) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
FRESHET_INLINE I32 shr(I32 x, int n) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
FRESHET_INLINE I32 sar(I32 x, int n) {
  return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
FRESHET_INLINE I32 add_madd_i(I32 sum, I32 x, I32 y) {
#if defined(__AVXVNNI__)
  return {_mm256_dpwssd_avx_epi32(sum.a, x.a, y.a), _mm256_dpwssd_avx_epi32(sum.b, x.b, y.b)};
#else
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, y.a)),
          _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, y.b))};
#endif
}
FRESHET_INLINE I32 max_i(I32 x, I32 y) {
  return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)};
}
FRESHET_INLINE int32_t reduce_max(I32 x) {
  const __m256i m = _mm256_max_epi32(x.a, x.b);
  __m128i v = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
FRESHET_INLINE void sums_of_16(const uint8_t* bytes, int32_t (&sum)[16]) {
  for (int g = 0; g < 16; g += 8) {
    __m256i s[4];  // sums of four
    for (int i = 0; i < 4; ++i) {
      const auto* from = reinterpret_cast<const __m256i*>(bytes + (g + i * 2) * 16);
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256(from));
      s[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    // Even groups are in the lower halves, odd groups in the upper halves.
    const __m256i all =
        _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sum + g),
                        _mm256_permutevar8x32_epi32(all, order));
  }
}
FRESHET_INLINE I32 bits_i(F32 x) {
  return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
FRESHET_INLINE I32 round_i(F32 x) {
  return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
FRESHET_INLINE I32 swap_middle(I32 x) {
  return {_mm256_shuffle_epi32(x.a, 0xd8), _mm256_shuffle_epi32(x.b, 0xd8)};
}
FRESHET_INLINE void store_i8(void* p, I32 x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128(static_cast<__m128i*>(p), b);
}
FRESHET_INLINE void store_u16(void* p, I32 x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
  _mm256_storeu_si256(static_cast<__m256i*>(p), w);
}
FRESHET_INLINE F32 to_f(I32 x) {
  return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
FRESHET_INLINE F32 bits_f(I32 x) {
  return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
FRESHET_INLINE I32 look_up(const int8_t* table, I32 index) {
  const __m256i t =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
// The fourth bit of an index chooses between two tables of eight.
FRESHET_INLINE __m256 level_of_eight(__m256 low, __m256 high, __m256i index) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                          _mm256_permutevar8x32_ps(high, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
FRESHET_INLINE F32 level_at(const float (&levels)[16], I32 index) {
  const __m256 low = _mm256_loadu_ps(levels), high = _mm256_loadu_ps(levels + 8);
  return {level_of_eight(low, high, index.a), level_of_eight(low, high, index.b)};
}
FRESHET_INLINE I32 gather(const uint32_t* table, I32 index) {
  const int* t = reinterpret_cast<const int*>(table);
  return {_mm256_i32gather_epi32(t, index.a, 4), _mm256_i32gather_epi32(t, index.b, 4)};
}
FRESHET_INLINE __m256i quad(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

#if defined(__AVXVNNI__)

inline constexpr bool kFlipsSigns = false;
inline constexpr bool kPairScales = true;
FRESHET_INLINE I32 dot_quad(I32 sum, I32 line, const int8_t* x) {
  const __m256i q = quad(x);
  return {_mm256_dpbusd_avx_epi32(sum.a, line.a, q), _mm256_dpbusd_avx_epi32(sum.b, line.b, q)};
}
FRESHET_INLINE I32 add_mul_i(I32 sum, I32 x, I32 y) {
  return {_mm256_add_epi32(sum.a, _mm256_mullo_epi32(x.a, y.a)),
          _mm256_add_epi32(sum.b, _mm256_mullo_epi32(x.b, y.b))};
}

#else

inline constexpr bool kSumsStart = false;

// Forces the sum to be computed now: GCC 12 delays additions and stores the products until then.
FRESHET_INLINE void keep(I32& sum) {
  asm volatile("" : "+x"(sum.a), "+x"(sum.b));
}

// Moves the sign of the line's bytes to x. Two products of 128 * 127 fit in 16 bits.
FRESHET_INLINE I32 dot_quad(I32 sum, I32 line, const int8_t* x) {
  const __m256i q = quad(x), one = _mm256_set1_epi16(1);
  const __m256i a = _mm256_maddubs_epi16(_mm256_abs_epi8(line.a), _mm256_sign_epi8(q, line.a));
  const __m256i b = _mm256_maddubs_epi16(_mm256_abs_epi8(line.b), _mm256_sign_epi8(q, line.b));
  sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(a, one)),
         _mm256_add_epi32(sum.b, _mm256_madd_epi16(b, one))};
  keep(sum);
  return sum;
}

// A scale as a pair of 16-bit halves, so that one vpmaddwd both scales and adds pairs.
template <int kTop>
FRESHET_INLINE Scale make_scale(I32 s) {
  return or_i(and_i(s, set_i(0xffff)), shl(s, 16));
}

// Quads whose pair sums of products (u8 up to kTop times a value within +-127) fit in 16 bits.
template <int kTop>
inline constexpr int kQuadsIn16Bits = 32767 / (kTop * 254);

// kTop = 0: the lines are signed; their sign is moved to x.
template <int T, int kQuads, int kTop, class Lines>
FRESHET_INLINE void dot_scaled(I32 (&sum)[T], Scale scale, const Lines& w, int first,
                               const int8_t* const (&x)[T]) {
  if constexpr (kTop == 0) {
#pragma GCC unroll 8
    for (int p = 0; p < kQuads; ++p) {
      const I32 line = w.line(first + p);
      const I32 size = {_mm256_abs_epi8(line.a), _mm256_abs_epi8(line.b)};
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i q = quad(x[t] + 4 * p);
        const __m256i a = _mm256_maddubs_epi16(size.a, _mm256_sign_epi8(q, line.a));
        const __m256i b = _mm256_maddubs_epi16(size.b, _mm256_sign_epi8(q, line.b));
        sum[t].a = _mm256_add_epi32(sum[t].a, _mm256_madd_epi16(a, scale.a));
        sum[t].b = _mm256_add_epi32(sum[t].b, _mm256_madd_epi16(b, scale.b));
        keep(sum[t]);
      }
    }
  } else {
    constexpr int kStep = kQuadsIn16Bits<kTop> < kQuads ? kQuadsIn16Bits<kTop> : kQuads;
    static_assert(kStep > 0 && kQuads % kStep == 0);
#pragma GCC unroll 8
    for (int p = 0; p < kQuads; p += kStep) {
      I32 d[T];
#pragma GCC unroll 8
      for (int i = 0; i < kStep; ++i) {
        const I32 line = w.line(first + p + i);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const __m256i q = quad(x[t] + 4 * (p + i));
          const __m256i a = _mm256_maddubs_epi16(line.a, q);
          const __m256i b = _mm256_maddubs_epi16(line.b, q);
          d[t].a = i == 0 ? a : _mm256_add_epi16(d[t].a, a);
          d[t].b = i == 0 ? b : _mm256_add_epi16(d[t].b, b);
          keep(d[t]);
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sum[t] = add_madd_i(sum[t], d[t], scale);
    }
  }
}

// The same for signed lines. The bits of x are inverted where the line's byte is negative, which
// differs from a negation by one. The missing part does not depend on x, so sums can start with it.
// vpsignb would compete with a multiplication on AMD processors. 128 times -128 fits twice.
inline constexpr bool kFlipsSigns = true;
template <int T, int kQuads, class Lines>
FRESHET_INLINE void dot_flipped(I32 (&sum)[T], Scale scale, const Lines& w, int first,
                                const int8_t* const (&x)[T]) {
  const __m256i zero = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int p = 0; p < kQuads; ++p) {
    const I32 line = w.line(first + p);
    const I32 below = {_mm256_cmpgt_epi8(zero, line.a), _mm256_cmpgt_epi8(zero, line.b)};
    const I32 size = {_mm256_abs_epi8(line.a), _mm256_abs_epi8(line.b)};
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256i q = quad(x[t] + 4 * p);
      const __m256i a = _mm256_maddubs_epi16(size.a, _mm256_xor_si256(q, below.a));
      const __m256i b = _mm256_maddubs_epi16(size.b, _mm256_xor_si256(q, below.b));
      sum[t].a = _mm256_add_epi32(sum[t].a, _mm256_madd_epi16(a, scale.a));
      sum[t].b = _mm256_add_epi32(sum[t].b, _mm256_madd_epi16(b, scale.b));
      keep(sum[t]);
    }
  }
}
// sum + scale * the part that dot_flipped omits from a line's products.
FRESHET_INLINE I32 add_flipped(I32 sum, Scale scale, I32 line) {
  const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi8(1);
  const I32 below = {_mm256_abs_epi8(_mm256_min_epi8(line.a, zero)),
                     _mm256_abs_epi8(_mm256_min_epi8(line.b, zero))};
  const I32 pairs = {_mm256_maddubs_epi16(below.a, one), _mm256_maddubs_epi16(below.b, one)};
  return add_madd_i(sum, pairs, scale);
}

template <int T, int kQuads, int kTop, class Lines>
FRESHET_INLINE void dot_plain(I32 (&sum)[T], const Lines& w, const int8_t* const (&x)[T]) {
  dot_scaled<T, kQuads, kTop>(sum, make_scale<kTop>(set_i(1)), w, 0, x);
}

#endif

}  // namespace
}  // namespace freshet::cpu

#if defined(__AVXVNNI__)
#include "backend/cpu/dot_quads.inl"
#endif

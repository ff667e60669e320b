// Sixteen lanes of 32 bits in one AVX-512 register. simd_scalar.h documents the names.
#pragma once

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#define FRESHET_INLINE static inline __attribute__((always_inline))
#define FRESHET_INLINE_MEMBER inline __attribute__((always_inline))
#define FRESHET_UNROLL _Pragma("GCC unroll 64")

namespace freshet::cpu {
namespace {

using F32 = __m512;
using I32 = __m512i;
using Scale = I32;

inline constexpr int16_t kE4M3InF16 = static_cast<int16_t>(0xbf80);
inline constexpr int kMaxTile = 8;  // tokens per pass over a panel
inline constexpr int kFloatTile = 8;
inline constexpr int kInt8Tile = 16;
#if defined(__AVX512VNNI__)
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
  return _mm512_setzero_ps();
}
FRESHET_INLINE F32 set_f(float x) {
  return _mm512_set1_ps(x);
}
FRESHET_INLINE F32 load_f(const float* p) {
  return _mm512_loadu_ps(p);
}
FRESHET_INLINE void store_f(float* p, F32 v) {
  _mm512_storeu_ps(p, v);
}
FRESHET_INLINE F32 add_f(F32 a, F32 b) {
  return _mm512_add_ps(a, b);
}
FRESHET_INLINE F32 sub_f(F32 a, F32 b) {
  return _mm512_sub_ps(a, b);
}
FRESHET_INLINE F32 mul_f(F32 a, F32 b) {
  return _mm512_mul_ps(a, b);
}
FRESHET_INLINE F32 fma_f(F32 a, F32 b, F32 c) {
  return _mm512_fmadd_ps(a, b, c);
}
FRESHET_INLINE F32 load_f16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
FRESHET_INLINE F32 e4m3_above(__m256i v) {
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(v, 1), _mm256_set1_epi16(kE4M3InF16)));
}
FRESHET_INLINE void load_e4m3(const void* p, F32& even, F32& odd) {
  const __m256i v = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  even = e4m3_above(_mm256_slli_epi16(v, 8));
  odd = e4m3_above(v);
}

FRESHET_INLINE I32 zero_i() {
  return _mm512_setzero_si512();
}
FRESHET_INLINE I32 set_i(int32_t x) {
  return _mm512_set1_epi32(x);
}
FRESHET_INLINE I32 load_i(const void* p) {
  return _mm512_loadu_si512(p);
}
FRESHET_INLINE void store_i(void* p, I32 v) {
  _mm512_storeu_si512(p, v);
}
FRESHET_INLINE I32 load_u8(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
FRESHET_INLINE I32 load_u16(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
FRESHET_INLINE I32 add_i(I32 a, I32 b) {
  return _mm512_add_epi32(a, b);
}
FRESHET_INLINE I32 sub_i(I32 a, I32 b) {
  return _mm512_sub_epi32(a, b);
}
FRESHET_INLINE I32 and_i(I32 a, I32 b) {
  return _mm512_and_si512(a, b);
}
FRESHET_INLINE I32 or_i(I32 a, I32 b) {
  return _mm512_or_si512(a, b);
}
FRESHET_INLINE I32 xor_i(I32 a, I32 b) {
  return _mm512_xor_si512(a, b);
}
FRESHET_INLINE I32 shl(I32 a, int n) {
  return _mm512_slli_epi32(a, static_cast<unsigned>(n));
}
FRESHET_INLINE I32 shr(I32 a, int n) {
  return _mm512_srli_epi32(a, static_cast<unsigned>(n));
}
FRESHET_INLINE I32 sar(I32 a, int n) {
  return _mm512_srai_epi32(a, static_cast<unsigned>(n));
}
FRESHET_INLINE I32 add_madd_i(I32 sum, I32 a, I32 b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
FRESHET_INLINE I32 max_i(I32 a, I32 b) {
  return _mm512_max_epi32(a, b);
}
FRESHET_INLINE int32_t reduce_max(I32 a) {
  return _mm512_reduce_max_epi32(a);
}
// Sums of 16 bytes: lane l of line i goes to dword i of lane l.
FRESHET_INLINE I32 sums_of_16(const I32 (&line)[4]) {
  const I32 one = _mm512_set1_epi16(1);
  I32 s[4];  // sums of four
  FRESHET_UNROLL
  for (int i = 0; i < 4; ++i) {
    s[i] = _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_set1_epi8(1), line[i]), one);
  }
  const I32 low = _mm512_madd_epi16(_mm512_packs_epi32(s[0], s[1]), one);
  const I32 high = _mm512_madd_epi16(_mm512_packs_epi32(s[2], s[3]), one);
  return _mm512_madd_epi16(_mm512_packs_epi32(low, high), one);
}
FRESHET_INLINE void sums_of_16(const uint8_t* bytes, int32_t (&sum)[16]) {
  I32 line[4];
  FRESHET_UNROLL
  for (int i = 0; i < 4; ++i) line[i] = _mm512_loadu_si512(bytes + i * 64);
  const I32 order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(sum, _mm512_permutexvar_epi32(order, sums_of_16(line)));
}
FRESHET_INLINE I32 bits_i(F32 a) {
  return _mm512_castps_si512(a);
}
FRESHET_INLINE I32 round_i(F32 a) {
  return _mm512_cvtps_epi32(a);
}
FRESHET_INLINE I32 swap_middle(I32 a) {
  return _mm512_shuffle_epi32(a, _MM_PERM_DBCA);
}
FRESHET_INLINE void store_i8(void* p, I32 a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
FRESHET_INLINE void store_u16(void* p, I32 a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
}
FRESHET_INLINE F32 to_f(I32 a) {
  return _mm512_cvtepi32_ps(a);
}
FRESHET_INLINE F32 bits_f(I32 a) {
  return _mm512_castsi512_ps(a);
}
FRESHET_INLINE I32 look_up(const int8_t* table, I32 index) {
  const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), index);
}
FRESHET_INLINE F32 level_at(const float (&levels)[16], I32 index) {
  return _mm512_permutexvar_ps(index, _mm512_loadu_ps(levels));
}
FRESHET_INLINE I32 gather(const uint32_t* table, I32 index) {
  return _mm512_i32gather_epi32(index, table, 4);
}

inline constexpr bool kFlipsSigns = false;
#if defined(__AVX512VNNI__)
inline constexpr bool kPairScales = true;
// The compiler does not fold the broadcast into the instruction on its own.
FRESHET_INLINE I32 dot_quad(I32 sum, I32 line, const int8_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(sum)
      : "v"(line), "m"(*reinterpret_cast<const int8_t(*)[4]>(x)));
  return sum;
}
FRESHET_INLINE I32 add_mul_i(I32 sum, I32 a, I32 b) {
  return _mm512_add_epi32(sum, _mm512_mullo_epi32(a, b));
}
#else
inline constexpr bool kSumsStart = false;
#endif

}  // namespace
}  // namespace freshet::cpu

#if defined(__AVX512VNNI__)
#include "backend/cpu/dot_quads.inl"
#endif

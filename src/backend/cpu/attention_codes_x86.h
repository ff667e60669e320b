// The integer operations of attention_coded.h on x86.
//
// A vector V holds words of four codes (unsigned bytes). Coarse and Fine are accumulators for codes
// times integers of 8 bits and of 16 bits. For four codes, add() takes kCoarse or kFine words of
// such integers, which pack() makes; they are `plane` words apart.
#pragma once

#include <cstdint>

#include <immintrin.h>

namespace freshet::cpu {
namespace {

#define FRESHET_CODES static inline __attribute__((always_inline))

struct CodesAvx2 {
  using V = __m256i;
  static constexpr int kCoarse = 1, kFine = 2;
  // Pairs of products. 32 codes of 4 bits times 8 bits fit: 16 * 15 * 127 = 30,480.
  struct Coarse {
    V pairs = _mm256_setzero_si256();
  };
  struct Fine {
    V sum = _mm256_setzero_si256();
  };

  FRESHET_CODES V zero() { return _mm256_setzero_si256(); }
  FRESHET_CODES V load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  FRESHET_CODES V low(V codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
  FRESHET_CODES V high(V codes) { return low(_mm256_srli_epi16(codes, 4)); }
  FRESHET_CODES void add(Coarse& c, V codes, const int32_t* word, int /*plane*/) {
    c.pairs = _mm256_add_epi16(c.pairs, _mm256_maddubs_epi16(codes, _mm256_set1_epi32(*word)));
  }
  FRESHET_CODES V total(const Coarse& c, int32_t fix) {
    const V sum = _mm256_madd_epi16(c.pairs, _mm256_set1_epi16(1));
    return _mm256_add_epi32(sum, _mm256_set1_epi32(fix));
  }
  FRESHET_CODES void add(Fine& f, V codes, const int32_t* words, int plane) {
    const V even = _mm256_and_si256(codes, _mm256_set1_epi16(255));
    const V odd = _mm256_srli_epi16(codes, 8);
    const V a = _mm256_madd_epi16(even, _mm256_set1_epi32(words[0]));
    const V b = _mm256_madd_epi16(odd, _mm256_set1_epi32(words[plane]));
    f.sum = _mm256_add_epi32(f.sum, _mm256_add_epi32(a, b));
  }
  FRESHET_CODES V total(const Fine& f, int32_t fix) {
    return _mm256_add_epi32(f.sum, _mm256_set1_epi32(fix));
  }
  FRESHET_CODES __m256 to_float(V v) { return _mm256_cvtepi32_ps(v); }
  // Rounds 16 values times `factor` to integers, adds these to `sum`, and writes their words.
  template <int kWords>
  FRESHET_CODES void pack(const float* x, __m256 factor, int32_t* to, int plane, V& sum) {
    const V a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor));
    const V b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
    const V words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);  // in order
    if constexpr (kWords == kCoarse) {
      const V bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xd8);
      put(to, _mm256_castsi256_si128(bytes));
    } else {
      put_pairs(words, to, plane);
    }
  }
  // Elements 0, 2, 4 ... of 16 in pairs, then 1, 3, 5 ...
  FRESHET_CODES void put_pairs(__m256i words, int32_t* to, int plane) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const V halves = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order));
    const V pairs = _mm256_permute4x64_epi64(halves, 0xd8);
    put(to, _mm256_castsi256_si128(pairs));
    put(to + plane, _mm256_extracti128_si256(pairs, 1));
  }
  FRESHET_CODES void put(int32_t* to, __m128i words) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
  }
  FRESHET_CODES int32_t reduce_add(V v) {
    return reduce_add(_mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
  FRESHET_CODES int32_t reduce_add(__m128i v) {
    const __m128i two = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
  }
  // Features of low and high halves in ascending order.
  FRESHET_CODES void in_order(__m256 lows, __m256 highs, __m256 (&out)[2]) {
    out[0] = _mm256_permute2f128_ps(lows, highs, 0x20);
    out[1] = _mm256_permute2f128_ps(lows, highs, 0x31);
  }
};

#ifdef __AVX512BW__
struct CodesAvx512 {
  using V = __m512i;
  static constexpr int kCoarse = 1, kFine = 2;
  struct Coarse {
    V pairs = _mm512_setzero_si512();
  };
  struct Fine {
    V sum = _mm512_setzero_si512();
  };

  FRESHET_CODES V zero() { return _mm512_setzero_si512(); }
  FRESHET_CODES V load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  FRESHET_CODES V low(V codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
  FRESHET_CODES V high(V codes) { return low(_mm512_srli_epi16(codes, 4)); }
  FRESHET_CODES void add(Coarse& c, V codes, const int32_t* word, int /*plane*/) {
    c.pairs = _mm512_add_epi16(c.pairs, _mm512_maddubs_epi16(codes, _mm512_set1_epi32(*word)));
  }
  FRESHET_CODES V total(const Coarse& c, int32_t fix) {
    const V sum = _mm512_madd_epi16(c.pairs, _mm512_set1_epi16(1));
    return _mm512_add_epi32(sum, _mm512_set1_epi32(fix));
  }
  FRESHET_CODES void add(Fine& f, V codes, const int32_t* words, int plane) {
    const V even = _mm512_and_si512(codes, _mm512_set1_epi16(255));
    const V odd = _mm512_srli_epi16(codes, 8);
    const V a = _mm512_madd_epi16(even, _mm512_set1_epi32(words[0]));
    const V b = _mm512_madd_epi16(odd, _mm512_set1_epi32(words[plane]));
    f.sum = _mm512_add_epi32(f.sum, _mm512_add_epi32(a, b));
  }
  FRESHET_CODES V total(const Fine& f, int32_t fix) {
    return _mm512_add_epi32(f.sum, _mm512_set1_epi32(fix));
  }
  FRESHET_CODES __m512 to_float(V v) { return _mm512_cvtepi32_ps(v); }
  template <int kWords>
  FRESHET_CODES void pack(const float* x, __m512 factor, int32_t* to, int plane, V& sum) {
    const V v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor));
    sum = _mm512_add_epi32(sum, v);
    if constexpr (kWords == kCoarse) {
      CodesAvx2::put(to, _mm512_cvtepi32_epi8(v));
    } else {
      CodesAvx2::put_pairs(_mm512_cvtepi32_epi16(v), to, plane);
    }
  }
  FRESHET_CODES int32_t reduce_add(V v) { return _mm512_reduce_add_epi32(v); }
  FRESHET_CODES void in_order(__m512 lows, __m512 highs, __m512 (&out)[2]) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    out[0] = _mm512_permutex2var_ps(lows, first, highs);
    out[1] = _mm512_permutex2var_ps(lows, second, highs);
  }
};
#endif

#ifdef __AVX512VNNI__
struct CodesAvx512Vnni : CodesAvx512 {
  struct Coarse {
    V sum = _mm512_setzero_si512();
  };
  struct Fine {  // of high and low bytes, both signed
    V high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
  };

  FRESHET_CODES void add(Coarse& c, V codes, const int32_t* word, int /*plane*/) {
    c.sum = _mm512_dpbusd_epi32(c.sum, codes, _mm512_set1_epi32(*word));
  }
  FRESHET_CODES V total(const Coarse& c, int32_t fix) {
    return _mm512_add_epi32(c.sum, _mm512_set1_epi32(fix));
  }
  FRESHET_CODES void add(Fine& f, V codes, const int32_t* words, int plane) {
    f.high = _mm512_dpbusd_epi32(f.high, codes, _mm512_set1_epi32(words[0]));
    f.low = _mm512_dpbusd_epi32(f.low, codes, _mm512_set1_epi32(words[plane]));
  }
  FRESHET_CODES V total(const Fine& f, int32_t fix) {
    const V sum = _mm512_add_epi32(_mm512_slli_epi32(f.high, 8), f.low);
    return _mm512_add_epi32(sum, _mm512_set1_epi32(fix));
  }
  template <int kWords>
  FRESHET_CODES void pack(const float* x, __m512 factor, int32_t* to, int plane, V& sum) {
    if constexpr (kWords == kCoarse) return CodesAvx512::pack<kWords>(x, factor, to, plane, sum);
    const V v = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor));
    sum = _mm512_add_epi32(sum, v);
    const V up = _mm512_add_epi32(v, _mm512_set1_epi32(128));
    CodesAvx2::put(to, _mm512_cvtepi32_epi8(_mm512_srai_epi32(up, 8)));
    CodesAvx2::put(to + plane, _mm512_cvtepi32_epi8(v));
  }
};
#endif

#undef FRESHET_CODES

}  // namespace
}  // namespace freshet::cpu

// Rounding to the cache's types, eight values at a time, for sources compiled with AVX2 and F16C.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "ops/attention.h"

namespace freshet::cpu {
namespace {

inline __m128i to_f16(__m256 x) {
  const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
  const __m256 clamped = _mm256_max_ps(least, _mm256_min_ps(most, x));  // NaN stays NaN
  return _mm256_cvtps_ph(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline __m128i to_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
}

// The result is in the lower eight bytes.
inline __m128i to_e4m3(__m256 x) {
  const __m256i u = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
  __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32(120 << 3));
  code = _mm256_min_epi32(code, _mm256_set1_epi32(0x7e));
  // For magnitudes below 2^-6: after this addition, the sum holds multiples of 2^-9.
  const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(u), _mm256_set1_ps(16384.0f));
  const __m256i least = _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(15));
  const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), u);
  code = _mm256_blendv_epi8(code, least, small);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  code = _mm256_or_si256(code, _mm256_and_si256(is_nan, _mm256_set1_epi32(0x7f)));
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_castps_si256(x), 31), 7);
  code = _mm256_or_si256(code, sign);
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  return _mm_packus_epi16(words, words);
}

// Returns the scale's bits. n <= kScaledFeatures.
inline uint16_t to_int8(const float* x, int64_t n, int8_t* out) {
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
    largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  const __m128i four =
      _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
  const __m128i one = _mm_max_epu32(two, _mm_shuffle_epi32(two, 1));
  const ops::KvScale s = ops::int8_scale(static_cast<uint32_t>(_mm_cvtsi128_si32(one)));
  const __m256 most = _mm256_set1_ps(127.0f), least = _mm256_set1_ps(-127.0f);
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(s.to_code));
    const __m256i code = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(v, most), least));
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packs_epi16(words, words));
  }
  return s.bits;
}

inline void convert_to_cache(ops::KvType type, const float* x, int64_t n, void* out,
                             uint16_t* scales) {
  if (type == ops::KvType::kInt8) {
    for (int64_t i = 0; i < n; i += ops::kScaledFeatures, scales += ops::kBlockTokens) {
      const int64_t some = n - i < ops::kScaledFeatures ? n - i : ops::kScaledFeatures;
      *scales = to_int8(x + i, some, static_cast<int8_t*>(out) + i);
    }
    return;
  }
  for (int64_t i = 0; i < n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    if (type == ops::KvType::kF32) {
      _mm256_storeu_ps(static_cast<float*>(out) + i, v);
    } else if (type == ops::KvType::kFP8) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(static_cast<uint8_t*>(out) + i), to_e4m3(v));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out) + i),
                       type == ops::KvType::kF16 ? to_f16(v) : to_bf16(v));
    }
  }
}

}  // namespace
}  // namespace freshet::cpu

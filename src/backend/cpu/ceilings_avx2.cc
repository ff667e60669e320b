#include <immintrin.h>

#include "backend/cpu/ceilings_probe.h"

namespace freshet::cpu {
namespace {

constexpr int kChains = 12;

void run_f32(int64_t turns) {
  __m256 sum[kChains];
  for (auto& s : sum) s = _mm256_setzero_ps();
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) {
      sum[k] = _mm256_fmadd_ps(a, b, sum[k]);
      asm volatile("" : "+x"(sum[k]));
    }
  }
}

// The steps of a byte dot product: multiply pairs, add pairs of pairs, add to the sum.
void run_int8(int64_t turns) {
  __m256i sum[kChains];
  for (auto& s : sum) s = _mm256_setzero_si256();
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2), ones = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) {
      __m256i product = _mm256_maddubs_epi16(a, b);
      asm volatile("" : "+x"(product));
      sum[k] = _mm256_add_epi32(sum[k], _mm256_madd_epi16(product, ones));
      asm volatile("" : "+x"(sum[k]));
    }
  }
}

}  // namespace

const IsaProbes kAvx2Probes = {{"avx2 f32", kChains * 16.0, run_f32},
                               {"avx2 int8", kChains * 64.0, run_int8}};

}  // namespace freshet::cpu

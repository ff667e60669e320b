#include <immintrin.h>

#include "backend/cpu/ceilings_probe.h"

namespace freshet::cpu {
namespace {

constexpr int kChains = 12;

void run_int8(int64_t turns) {
  __m256i sum[kChains];
  for (auto& s : sum) s = _mm256_setzero_si256();
  const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
    for (int k = 0; k < kChains; ++k) {
      sum[k] = _mm256_dpbusd_avx_epi32(sum[k], a, b);
      asm volatile("" : "+x"(sum[k]));
    }
  }
}

}  // namespace

const IsaProbes kAvxVnniProbes = {{nullptr, 0.0, nullptr},
                                  {"avxvnni int8", kChains * 64.0, run_int8}};

}  // namespace freshet::cpu

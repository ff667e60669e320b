#include <immintrin.h>

#include "backend/cpu/ceilings_probe.h"

namespace freshet::cpu {
namespace {

constexpr int kChains = 16;

void run_int8(int64_t turns) {
  __m512i sum[kChains];
#pragma GCC unroll 16
  for (auto& s : sum) s = _mm512_setzero_si512();
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) {
      sum[k] = _mm512_dpbusd_epi32(sum[k], a, b);
      asm volatile("" : "+v"(sum[k]));
    }
  }
}

}  // namespace

const IsaProbes kAvx512VnniProbes = {{nullptr, 0.0, nullptr},
                                     {"avx512vnni int8", kChains * 128.0, run_int8}};

}  // namespace freshet::cpu

#include <immintrin.h>

#include "backend/cpu/ceilings_probe.h"

namespace freshet::cpu {
namespace {

constexpr int kChains = 16;

void run_f32(int64_t turns) {
  __m512 sum[kChains];
#pragma GCC unroll 16
  for (auto& s : sum) s = _mm512_setzero_ps();
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) {
      sum[k] = _mm512_fmadd_ps(a, b, sum[k]);
      asm volatile("" : "+v"(sum[k]));
    }
  }
}

}  // namespace

const IsaProbes kAvx512Probes = {{"avx512 f32", kChains * 32.0, run_f32}, {nullptr, 0.0, nullptr}};

}  // namespace freshet::cpu

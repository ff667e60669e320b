#include <arm_neon.h>

#include "backend/cpu/ceilings_probe.h"

namespace freshet::cpu {
namespace {

constexpr int kChains = 16;

void run_int8(int64_t turns) {
  int32x4_t sum[kChains];
  for (auto& s : sum) s = vdupq_n_s32(0);
  const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(-2);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) {
      sum[k] = vdotq_s32(sum[k], a, b);
      asm volatile("" : "+w"(sum[k]));
    }
  }
}

}  // namespace

const IsaProbes kNeonDotProbes = {{nullptr, 0.0, nullptr},
                                  {"neondot int8", kChains * 32.0, run_int8}};

}  // namespace freshet::cpu

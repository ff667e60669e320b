#include <arm_neon.h>

#include "backend/cpu/ceilings_probe.h"

namespace freshet::cpu {
namespace {

constexpr int kChains = 16;

void run_f32(int64_t turns) {
  float32x4_t sum[kChains];
  for (auto& s : sum) s = vdupq_n_f32(0.0f);
  const float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(0.25f);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) {
      sum[k] = vfmaq_f32(sum[k], a, b);
      asm volatile("" : "+w"(sum[k]));
    }
  }
}

// The steps of a byte dot product: multiply, add pairs, add pairs of pairs to the sum.
void run_int8(int64_t turns) {
  int32x4_t sum[kChains];
  for (auto& s : sum) s = vdupq_n_s32(0);
  int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(-2);
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < kChains; ++k) {
      asm volatile("" : "+w"(a), "+w"(b));
      const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
      sum[k] = vpadalq_s16(sum[k], vpaddq_s16(low, vmull_high_s8(a, b)));
      asm volatile("" : "+w"(sum[k]));
    }
  }
}

}  // namespace

const IsaProbes kNeonProbes = {{"neon f32", kChains * 8.0, run_f32},
                               {"neon int8", kChains * 32.0, run_int8}};

}  // namespace freshet::cpu

// attention_convert.h for NEON.
#pragma once

#include <cstdint>

#include <arm_neon.h>

#include "ops/attention.h"

namespace freshet::cpu {
namespace {

inline uint16x4_t to_f16(float32x4_t x) {
  const float32x4_t most = vdupq_n_f32(65504.0f), least = vdupq_n_f32(-65504.0f);
  return vreinterpret_u16_f16(vcvt_f16_f32(vmaxq_f32(least, vminq_f32(most, x))));  // NaN stays
}

inline uint16x4_t to_bf16(float32x4_t x) {
  const uint32x4_t u = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16);
}

inline void convert_to_cache(ops::KvType type, const float* x, int64_t n, void* out) {
  for (int64_t i = 0; i < n; i += 4) {
    const float32x4_t v = vld1q_f32(x + i);
    if (type == ops::KvType::kF32) {
      vst1q_f32(static_cast<float*>(out) + i, v);
    } else {
      vst1_u16(static_cast<uint16_t*>(out) + i, type == ops::KvType::kF16 ? to_f16(v) : to_bf16(v));
    }
  }
}

}  // namespace
}  // namespace freshet::cpu

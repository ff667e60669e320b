// attention_convert.h for NEON.
#pragma once

#include <cstdint>

#include <arm_neon.h>

#include "ops/attention.h"

namespace freshet::cpu {
namespace {

inline uint16x4_t to_f16(float32x4_t x) {
  const float32x4_t most = vdupq_n_f32(65504.0f), least = vdupq_n_f32(-65504.0f);
  return vreinterpret_u16_f16(vcvt_f16_f32(vmaxq_f32(least, vminq_f32(most, x))));  // NaN stays NaN
}

inline uint16x4_t to_bf16(float32x4_t x) {
  const uint32x4_t u = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(u, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), up, quiet), 16);
}

// Each result is in the lower byte of its lane.
inline uint16x4_t to_e4m3(float32x4_t x) {
  const uint32x4_t u = vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffff));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 20), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7ffff)));
  uint32x4_t code = vsubq_u32(vshrq_n_u32(up, 20), vdupq_n_u32(120 << 3));
  code = vminq_u32(code, vdupq_n_u32(0x7e));
  // For magnitudes below 2^-6: after this addition, the sum holds multiples of 2^-9.
  const float32x4_t sum = vaddq_f32(vreinterpretq_f32_u32(u), vdupq_n_f32(16384.0f));
  const uint32x4_t least = vandq_u32(vreinterpretq_u32_f32(sum), vdupq_n_u32(15));
  code = vbslq_u32(vcltq_u32(u, vdupq_n_u32(121 << 23)), least, code);
  code = vbslq_u32(vceqq_f32(x, x), code, vdupq_n_u32(0x7f));
  const uint32x4_t sign = vshlq_n_u32(vshrq_n_u32(vreinterpretq_u32_f32(x), 31), 7);
  return vmovn_u32(vorrq_u32(code, sign));
}

// Returns the scale's bits. n <= kScaledFeatures.
inline uint16_t to_int8(const float* x, int64_t n, int8_t* out) {
  uint32x4_t largest = vdupq_n_u32(0);
  for (int64_t i = 0; i < n; i += 4) {
    const uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + i));
    largest = vmaxq_u32(largest, vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
  }
  const ops::KvScale s = ops::int8_scale(vmaxvq_u32(largest));
  const auto codes = [&](const float* from) {
    const float32x4_t v = vmulq_n_f32(vld1q_f32(from), s.to_code);
    const float32x4_t near = vmaxq_f32(vminq_f32(v, vdupq_n_f32(127.0f)), vdupq_n_f32(-127.0f));
    return vmovn_s32(vcvtnq_s32_f32(near));
  };
  for (int64_t i = 0; i < n; i += 8) {
    vst1_s8(out + i, vmovn_s16(vcombine_s16(codes(x + i), codes(x + i + 4))));
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
  for (int64_t i = 0; type == ops::KvType::kFP8 && i < n; i += 8) {
    const uint16x4_t low = to_e4m3(vld1q_f32(x + i)), high = to_e4m3(vld1q_f32(x + i + 4));
    vst1_u8(static_cast<uint8_t*>(out) + i, vmovn_u16(vcombine_u16(low, high)));
  }
  if (type == ops::KvType::kFP8) return;
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

// Eight F32 lanes in two NEON registers; same names as in vector_simd_avx512.h.
#pragma once

#include <cstdint>

#include <arm_neon.h>

namespace freshet::cpu {
namespace {

#define FRESHET_SIMD static inline __attribute__((always_inline))

struct Neon {
  struct F {
    float32x4_t a, b;
  };
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 6;
  static constexpr int kDotRows = 2;

  FRESHET_SIMD F zero() { return set(0.0f); }
  FRESHET_SIMD F set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  FRESHET_SIMD F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  FRESHET_SIMD void store(float* p, F v) {
    vst1q_f32(p, v.a);
    vst1q_f32(p + 4, v.b);
  }
  FRESHET_SIMD F load_n(const float* p, int n) {
    float lanes[8] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
  }
  FRESHET_SIMD void store_n(float* p, F v, int n) {
    float lanes[8];
    store(lanes, v);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
  }

  FRESHET_SIMD F add(F x, F y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
  FRESHET_SIMD F sub(F x, F y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
  FRESHET_SIMD F mul(F x, F y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
  FRESHET_SIMD F div(F x, F y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
  FRESHET_SIMD F fma(F x, F y, F z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
  FRESHET_SIMD F fnma(F x, F y, F z) {
    return {vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b)};
  }
  FRESHET_SIMD F fms(F x, F y, F z) {
    return {vfmaq_f32(vnegq_f32(z.a), x.a, y.a), vfmaq_f32(vnegq_f32(z.b), x.b, y.b)};
  }
  FRESHET_SIMD F min(F x, F y) { return if_less(x, y, x, y); }
  FRESHET_SIMD F max(F x, F y) { return if_less(y, x, x, y); }
  FRESHET_SIMD F round(F x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
  FRESHET_SIMD F abs(F x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
  FRESHET_SIMD F copy_sign(F x, F sign) {
    const uint32x4_t bit = vdupq_n_u32(0x80000000u);
    return {vbslq_f32(bit, sign.a, x.a), vbslq_f32(bit, sign.b, x.b)};
  }
  FRESHET_SIMD F if_less(F x, F y, F yes, F no) {
    return {vbslq_f32(vcltq_f32(x.a, y.a), yes.a, no.a),
            vbslq_f32(vcltq_f32(x.b, y.b), yes.b, no.b)};
  }
  FRESHET_SIMD F scale_by_power(F v, F n) {
    return {vmulq_f32(v.a, power(n.a)), vmulq_f32(v.b, power(n.b))};
  }
  FRESHET_SIMD F keep_range(F v, int64_t from, int64_t to, F other) {
    float in[8], out[8];
    store(in, v);
    store(out, other);
    for (int i = 0; i < 8; ++i) out[i] = i >= from && i < to ? in[i] : out[i];
    return load(out);
  }

  FRESHET_SIMD float reduce_add(F v) {
    const float32x4_t a = vaddq_f32(v.a, v.b);
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
  }
  FRESHET_SIMD float reduce_max(F v) { return vmaxvq_f32(vmaxq_f32(v.a, v.b)); }
  FRESHET_SIMD void reduce_add4(const F (&v)[4], float* out) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(v[i]);
  }

  FRESHET_SIMD F load_f16(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  }
  FRESHET_SIMD F load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(h, 16))};
  }
  // The values times 2^-8: exponent and mantissa are moved to their positions in an F16.
  FRESHET_SIMD F load_e4m3(const uint8_t* p) {
    const int16x8_t v = vshll_n_s8(vreinterpret_s8_u8(vld1_u8(p)), 7);
    const int16x8_t in_f16 = vdupq_n_s16(static_cast<int16_t>(0xbf80));
    const float16x8_t h = vreinterpretq_f16_s16(vandq_s16(v, in_f16));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  }
  FRESHET_SIMD F load_i8(const int8_t* p) {
    const int16x8_t v = vmovl_s8(vld1_s8(p));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))), vcvtq_f32_s32(vmovl_high_s16(v))};
  }
  // Row lengths are multiples of eight, so a partial vector is either full or empty.
  FRESHET_SIMD F load_f16_n(const uint16_t* p, int n) { return n > 0 ? load_f16(p) : zero(); }
  FRESHET_SIMD F load_bf16_n(const uint16_t* p, int n) { return n > 0 ? load_bf16(p) : zero(); }
  FRESHET_SIMD F load_e4m3_n(const uint8_t* p, int n) { return n > 0 ? load_e4m3(p) : zero(); }
  FRESHET_SIMD F load_i8_n(const int8_t* p, int n) { return n > 0 ? load_i8(p) : zero(); }
  FRESHET_SIMD void store_f16(uint16_t* p, F v) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b)));
  }

  FRESHET_SIMD void load_pairs(const float* p, F& even, F& odd) {
    const float32x4x2_t low = vld2q_f32(p), high = vld2q_f32(p + 8);
    even = {low.val[0], high.val[0]};
    odd = {low.val[1], high.val[1]};
  }
  FRESHET_SIMD void store_pairs(float* p, F even, F odd) {
    vst2q_f32(p, {{even.a, odd.a}});
    vst2q_f32(p + 8, {{even.b, odd.b}});
  }

 private:
  FRESHET_SIMD float32x4_t power(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
  }
};

#undef FRESHET_SIMD

}  // namespace
}  // namespace freshet::cpu

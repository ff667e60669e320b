// The integer operations of attention_coded.h on NEON; see attention_codes_x86.h. An integer takes
// one word, whether it has 8 or 16 bits.
#pragma once

#include <cstdint>

#include <arm_neon.h>

#include "backend/cpu/vector_simd_neon.h"

namespace freshet::cpu {
namespace {

#define FRESHET_CODES static inline __attribute__((always_inline))

struct CodesNeon {
  struct V {  // eight words
    int32x4_t a, b;
  };
  using F = Neon::F;
  static constexpr int kCoarse = 4, kFine = 4;
  struct Coarse {
    V sum = {vdupq_n_s32(0), vdupq_n_s32(0)};
  };
  using Fine = Coarse;

  FRESHET_CODES V zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  FRESHET_CODES V load(const uint8_t* p) {
    return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))};
  }
  FRESHET_CODES int32x4_t low(int32x4_t codes) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(15)));
  }
  FRESHET_CODES int32x4_t high(int32x4_t codes) {
    return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(codes), 4));
  }
  FRESHET_CODES V low(V codes) { return {low(codes.a), low(codes.b)}; }
  FRESHET_CODES V high(V codes) { return {high(codes.a), high(codes.b)}; }
  FRESHET_CODES int32x4_t add(int32x4_t sum, int32x4_t codes, const int32_t* words, int plane) {
    const uint32x4_t u = vreinterpretq_u32_s32(codes), byte = vdupq_n_u32(255);
    sum = vmlaq_n_s32(sum, vreinterpretq_s32_u32(vandq_u32(u, byte)), words[0]);
    const uint32x4_t second = vandq_u32(vshrq_n_u32(u, 8), byte);
    sum = vmlaq_n_s32(sum, vreinterpretq_s32_u32(second), words[plane]);
    const uint32x4_t third = vandq_u32(vshrq_n_u32(u, 16), byte);
    sum = vmlaq_n_s32(sum, vreinterpretq_s32_u32(third), words[2 * plane]);
    return vmlaq_n_s32(sum, vreinterpretq_s32_u32(vshrq_n_u32(u, 24)), words[3 * plane]);
  }
  FRESHET_CODES void add(Coarse& c, V codes, const int32_t* words, int plane) {
    c.sum.a = add(c.sum.a, codes.a, words, plane);
    c.sum.b = add(c.sum.b, codes.b, words, plane);
  }
  FRESHET_CODES V total(const Coarse& c, int32_t fix) {
    return {vaddq_s32(c.sum.a, vdupq_n_s32(fix)), vaddq_s32(c.sum.b, vdupq_n_s32(fix))};
  }
  FRESHET_CODES F to_float(V v) { return {vcvtq_f32_s32(v.a), vcvtq_f32_s32(v.b)}; }
  template <int kWords>
  FRESHET_CODES void pack(const float* x, F factor, int32_t* to, int plane, V& sum) {
    for (int quad = 0; quad < 4; ++quad) {
      const int32x4_t v = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 4 * quad), factor.a));
      sum.a = vaddq_s32(sum.a, v);
      int32_t words[4];
      vst1q_s32(words, v);
      for (int i = 0; i < 4; ++i) to[i * plane + quad] = words[i];
    }
  }
  FRESHET_CODES int32_t reduce_add(V v) { return vaddvq_s32(vaddq_s32(v.a, v.b)); }
  FRESHET_CODES void in_order(F lows, F highs, F (&out)[2]) {
    out[0] = {lows.a, highs.a};
    out[1] = {lows.b, highs.b};
  }
};

#undef FRESHET_CODES

}  // namespace
}  // namespace freshet::cpu

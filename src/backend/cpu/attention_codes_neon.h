// The integer operations of attention_coded.h on NEON; see attention_codes_x86.h. An integer of
// either size is a word of its own.
#pragma once

#include <cstdint>

#include <arm_neon.h>

namespace freshet::cpu {
namespace {

#define FRESHET_CODES static inline __attribute__((always_inline))

struct CodesNeon {
  using V = int32x4_t;
  static constexpr int kCoarse = 4, kFine = 4;
  struct Coarse {
    V sum = vdupq_n_s32(0);
  };
  using Fine = Coarse;

  FRESHET_CODES V zero() { return vdupq_n_s32(0); }
  FRESHET_CODES V load(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  FRESHET_CODES V low(V codes) {
    return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(15)));
  }
  FRESHET_CODES V high(V codes) {
    return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(codes), 4));
  }
  FRESHET_CODES void add(Coarse& c, V codes, const int32_t* words, int plane) {
    const uint32x4_t u = vreinterpretq_u32_s32(codes), byte = vdupq_n_u32(255);
    c.sum = vmlaq_n_s32(c.sum, vreinterpretq_s32_u32(vandq_u32(u, byte)), words[0]);
    c.sum =
        vmlaq_n_s32(c.sum, vreinterpretq_s32_u32(vandq_u32(vshrq_n_u32(u, 8), byte)), words[plane]);
    c.sum = vmlaq_n_s32(c.sum, vreinterpretq_s32_u32(vandq_u32(vshrq_n_u32(u, 16), byte)),
                        words[2 * plane]);
    c.sum = vmlaq_n_s32(c.sum, vreinterpretq_s32_u32(vshrq_n_u32(u, 24)), words[3 * plane]);
  }
  FRESHET_CODES V total(const Coarse& c, int32_t fix) { return vaddq_s32(c.sum, vdupq_n_s32(fix)); }
  FRESHET_CODES float32x4_t to_float(V v) { return vcvtq_f32_s32(v); }
  template <int kWords>
  FRESHET_CODES void pack(const float* x, float32x4_t factor, int32_t* to, int plane, V& sum) {
    for (int quad = 0; quad < 4; ++quad) {
      const V v = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 4 * quad), factor));
      sum = vaddq_s32(sum, v);
      int32_t words[4];
      vst1q_s32(words, v);
      for (int i = 0; i < 4; ++i) to[i * plane + quad] = words[i];
    }
  }
  FRESHET_CODES int32_t reduce_add(V v) { return vaddvq_s32(v); }
  FRESHET_CODES void in_order(float32x4_t lows, float32x4_t highs, float32x4_t (&out)[2]) {
    out[0] = lows;
    out[1] = highs;
  }
};

#undef FRESHET_CODES

}  // namespace
}  // namespace freshet::cpu

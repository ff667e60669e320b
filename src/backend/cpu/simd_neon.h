// Sixteen lanes of 32 bits in four NEON registers. simd_scalar.h documents the names.
#pragma once

#include <cstdint>
#include <cstring>

#include <arm_neon.h>

#define FRESHET_INLINE static inline __attribute__((always_inline))
#define FRESHET_INLINE_MEMBER inline __attribute__((always_inline))
#define FRESHET_UNROLL _Pragma("GCC unroll 64")
#ifndef __ARM_FEATURE_DOTPROD
// Without the dot-product instruction a line takes so many instructions that GCC would need minutes
// to compile unrolled tiles. A call per 32 values costs little in comparison.
#define FRESHET_DOT [[gnu::noinline]]
#endif

namespace freshet::cpu {
namespace {

struct F32 {
  float32x4_t v[4];
};
struct I32 {
  int32x4_t v[4];
};
using Scale = I32;

inline constexpr int16_t kE4M3InF16 = static_cast<int16_t>(0xbf80);
inline constexpr int kMaxTile = 4;
inline constexpr int kFloatTile = 2;
inline constexpr int kInt8Tile = 4;
inline constexpr bool kFlipSigned = false;  // both ways to multiply bytes take signed bytes

#define FRESHET_EACH(expression)                        \
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) { \
    expression;                                         \
  }

FRESHET_INLINE unsigned flush_denormals() {
  uint64_t before;
  asm volatile("mrs %0, fpcr" : "=r"(before));
  asm volatile("msr fpcr, %0" ::"r"(before | uint64_t{1} << 24) : "memory");
  return static_cast<unsigned>(before);
}
FRESHET_INLINE void restore_denormals(unsigned before) {
  asm volatile("msr fpcr, %0" ::"r"(uint64_t{before}) : "memory");
}
FRESHET_INLINE void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
}
FRESHET_INLINE void prefetch_near(const void* p) {
  __builtin_prefetch(p, 0, 3);
}

FRESHET_INLINE F32 set_f(float x) {
  F32 r;
  FRESHET_EACH(r.v[i] = vdupq_n_f32(x))
  return r;
}
FRESHET_INLINE F32 zero_f() {
  return set_f(0.0f);
}
FRESHET_INLINE F32 load_f(const float* p) {
  F32 r;
  FRESHET_EACH(r.v[i] = vld1q_f32(p + 4 * i))
  return r;
}
FRESHET_INLINE void store_f(float* p, F32 x){
    FRESHET_EACH(vst1q_f32(p + 4 * i, x.v[i]))} FRESHET_INLINE F32 add_f(F32 x, F32 y) {
  FRESHET_EACH(x.v[i] = vaddq_f32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE F32 sub_f(F32 x, F32 y) {
  FRESHET_EACH(x.v[i] = vsubq_f32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE F32 mul_f(F32 x, F32 y) {
  FRESHET_EACH(x.v[i] = vmulq_f32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE F32 fma_f(F32 x, F32 y, F32 z) {
  FRESHET_EACH(z.v[i] = vfmaq_f32(z.v[i], x.v[i], y.v[i]))
  return z;
}
FRESHET_INLINE F32 load_f16(const void* p) {
  F32 r;
  FRESHET_EACH(r.v[i] = vcvt_f32_f16(
                   vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(p) + 4 * i))))
  return r;
}
FRESHET_INLINE float32x4_t e4m3_above(int16x4_t v) {
  return vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(vshr_n_s16(v, 1), vdup_n_s16(kE4M3InF16))));
}
FRESHET_INLINE void load_e4m3(const void* p, F32& even, F32& odd) {
  for (int i = 0; i < 4; ++i) {
    const int16x4_t v = vld1_s16(static_cast<const int16_t*>(p) + 4 * i);
    even.v[i] = e4m3_above(vshl_n_s16(v, 8));
    odd.v[i] = e4m3_above(v);
  }
}

FRESHET_INLINE I32 set_i(int32_t x) {
  I32 r;
  FRESHET_EACH(r.v[i] = vdupq_n_s32(x))
  return r;
}
FRESHET_INLINE I32 zero_i() {
  return set_i(0);
}
FRESHET_INLINE I32 load_i(const void* p) {
  I32 r;
  FRESHET_EACH(r.v[i] = vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i)))
  return r;
}
FRESHET_INLINE void store_i(void* p, I32 x){
    FRESHET_EACH(vst1q_u8(static_cast<uint8_t*>(p) + 16 * i,
                          vreinterpretq_u8_s32(x.v[i])))} FRESHET_INLINE I32
    load_u16(const void* p) {
  I32 r;
  FRESHET_EACH(
      r.v[i] = vreinterpretq_s32_u32(vmovl_u16(vld1_u16(static_cast<const uint16_t*>(p) + 4 * i))))
  return r;
}
FRESHET_INLINE I32 load_u8(const void* p) {
  const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(p));
  uint16_t words[16];
  vst1q_u16(words, vmovl_u8(vget_low_u8(bytes)));
  vst1q_u16(words + 8, vmovl_u8(vget_high_u8(bytes)));
  return load_u16(words);
}
FRESHET_INLINE I32 add_i(I32 x, I32 y) {
  FRESHET_EACH(x.v[i] = vaddq_s32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE I32 sub_i(I32 x, I32 y) {
  FRESHET_EACH(x.v[i] = vsubq_s32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE I32 and_i(I32 x, I32 y) {
  FRESHET_EACH(x.v[i] = vandq_s32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE I32 or_i(I32 x, I32 y) {
  FRESHET_EACH(x.v[i] = vorrq_s32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE I32 xor_i(I32 x, I32 y) {
  FRESHET_EACH(x.v[i] = veorq_s32(x.v[i], y.v[i]))
  return x;
}
// The instruction shifts left by a signed count.
FRESHET_INLINE I32 shl(I32 x, int n) {
  FRESHET_EACH(x.v[i] = vshlq_s32(x.v[i], vdupq_n_s32(n)))
  return x;
}
FRESHET_INLINE I32 shr(I32 x, int n) {
  FRESHET_EACH(x.v[i] =
                   vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x.v[i]), vdupq_n_s32(-n))))
  return x;
}
FRESHET_INLINE I32 sar(I32 x, int n) {
  FRESHET_EACH(x.v[i] = vshlq_s32(x.v[i], vdupq_n_s32(-n)))
  return x;
}
FRESHET_INLINE I32 add_madd_i(I32 sum, I32 x, I32 y) {
  FRESHET_EACH(
      const int16x8_t a = vreinterpretq_s16_s32(x.v[i]);
      const int16x8_t b = vreinterpretq_s16_s32(y.v[i]);
      sum.v[i] = vaddq_s32(
          sum.v[i], vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b))))
  return sum;
}
FRESHET_INLINE I32 max_i(I32 x, I32 y) {
  FRESHET_EACH(x.v[i] = vmaxq_s32(x.v[i], y.v[i]))
  return x;
}
FRESHET_INLINE int32_t reduce_max(I32 x) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3])));
}
FRESHET_INLINE void sums_of_16(const uint8_t* bytes, int32_t (&sum)[16]) {
  for (int g = 0; g < 16; ++g) sum[g] = vaddlvq_s8(vreinterpretq_s8_u8(vld1q_u8(bytes + g * 16)));
}
FRESHET_INLINE I32 bits_i(F32 x) {
  I32 r;
  FRESHET_EACH(r.v[i] = vreinterpretq_s32_f32(x.v[i]))
  return r;
}
FRESHET_INLINE F32 bits_f(I32 x) {
  F32 r;
  FRESHET_EACH(r.v[i] = vreinterpretq_f32_s32(x.v[i]))
  return r;
}
FRESHET_INLINE I32 round_i(F32 x) {
  I32 r;
  FRESHET_EACH(r.v[i] = vcvtnq_s32_f32(x.v[i]))
  return r;
}
FRESHET_INLINE F32 to_f(I32 x) {
  F32 r;
  FRESHET_EACH(r.v[i] = vcvtq_f32_s32(x.v[i]))
  return r;
}
FRESHET_INLINE int16x8_t low_halves(int32x4_t a, int32x4_t b) {
  return vcombine_s16(vmovn_s32(a), vmovn_s32(b));
}
FRESHET_INLINE I32 swap_middle(I32 x) {
  FRESHET_EACH(const int32x2_t low = vget_low_s32(x.v[i]);
               const int32x2_t high = vget_high_s32(x.v[i]);
               x.v[i] = vcombine_s32(vzip1_s32(low, high), vzip2_s32(low, high)))
  return x;
}
FRESHET_INLINE void store_i8(void* p, I32 x) {
  vst1q_s8(static_cast<int8_t*>(p), vcombine_s8(vmovn_s16(low_halves(x.v[0], x.v[1])),
                                                vmovn_s16(low_halves(x.v[2], x.v[3]))));
}
FRESHET_INLINE void store_u16(void* p, I32 x) {
  int16_t* const to = static_cast<int16_t*>(p);
  vst1q_s16(to, low_halves(x.v[0], x.v[1]));
  vst1q_s16(to + 8, low_halves(x.v[2], x.v[3]));
}
FRESHET_INLINE I32 look_up(const int8_t* table, I32 index) {
  const int8x16_t t = vld1q_s8(table);
  FRESHET_EACH(index.v[i] = vreinterpretq_s32_s8(vqtbl1q_s8(t, vreinterpretq_u8_s32(index.v[i]))))
  return index;
}
FRESHET_INLINE F32 level_at(const float (&levels)[16], I32 index) {
  uint8x16x4_t t;
  FRESHET_EACH(t.val[i] = vreinterpretq_u8_f32(vld1q_f32(levels + 4 * i)))
  const uint32x4_t first_byte = vdupq_n_u32(0x03020100);
  F32 r;
  FRESHET_EACH(const uint32x4_t at = vandq_u32(vreinterpretq_u32_s32(index.v[i]), vdupq_n_u32(15));
               const uint32x4_t bytes = vmlaq_n_u32(first_byte, at, 0x04040404);
               r.v[i] = vreinterpretq_f32_u8(vqtbl4q_u8(t, vreinterpretq_u8_u32(bytes))))
  return r;
}
FRESHET_INLINE I32 gather(const uint32_t* table, I32 index) {
  alignas(64) uint32_t at[16];
  std::memcpy(at, &index, sizeof at);
  for (uint32_t& x : at) x = table[x];
  std::memcpy(&index, at, sizeof at);
  return index;
}

inline constexpr bool kFlipsSigns = false;
inline constexpr bool kPairScales = false;
// sum += the byte products, four per lane. A pair of products fits in 16 bits: x is within +-127.
FRESHET_INLINE int32x4_t dot4(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, w, x);
#else
  const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x));
  return vpadalq_s16(sum, pairs);
#endif
}

FRESHET_INLINE I32 dot_quad(I32 sum, I32 line, const int8_t* x) {
  int32_t v;
  std::memcpy(&v, x, 4);
  const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(v));
  FRESHET_EACH(sum.v[i] = dot4(sum.v[i], vreinterpretq_s8_s32(line.v[i]), q))
  return sum;
}
FRESHET_INLINE I32 add_mul_i(I32 sum, I32 x, I32 y) {
  FRESHET_EACH(sum.v[i] = vmlaq_s32(sum.v[i], x.v[i], y.v[i]))
  return sum;
}

#undef FRESHET_EACH

}  // namespace
}  // namespace freshet::cpu

#include "backend/cpu/dot_quads.inl"

// Sixteen lanes of 32 bits in plain C++: the reference implementation of the interface that the
// other simd_*.h headers vectorise.
//
// F32 and I32 are vectors of 16 lanes. A 64-byte line of packed weights is an I32 in which each
// lane holds four bytes. Everything here has internal linkage, because each instruction set
// compiles the same kernels in its own translation unit. fma_f rounds once on every instruction
// set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tensor/dtype.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define FRESHET_INLINE static inline
#define FRESHET_INLINE_MEMBER inline
#define FRESHET_UNROLL

namespace freshet::cpu {
namespace {

struct F32 {
  float v[16];
};
struct I32 {
  int32_t v[16];
};
using Scale = I32;

inline constexpr int kMaxTile = 4;    // tokens per pass over a panel
inline constexpr int kFloatTile = 4;  // the same for floating-point weights
inline constexpr int kInt8Tile = 4;   // the same for INT8, whose sums span the whole row
// Signed lines (q8_0, iq4_nl) are passed as unsigned bytes, 128 too high, because the dot
// instruction multiplies unsigned by signed bytes; the sum of x corrects for it.
inline constexpr bool kFlipSigned = false;

template <class V, class Fn>
FRESHET_INLINE V each(const Fn& fn) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i] = fn(i);
  return r;
}

// Makes denormal results and operands zero, as in BF16 AMX tiles.
FRESHET_INLINE unsigned flush_denormals() {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);
  return before;
#else
  return 0;
#endif
}
FRESHET_INLINE void restore_denormals(unsigned before) {
#if defined(__x86_64__)
  _mm_setcsr(before);
#else
  (void)before;
#endif
}
FRESHET_INLINE void prefetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
}
// Prefetches to the L1 cache.
FRESHET_INLINE void prefetch_near(const void* p) {
  __builtin_prefetch(p, 0, 3);
}

FRESHET_INLINE F32 zero_f() {
  return {};
}
FRESHET_INLINE F32 set_f(float x) {
  return each<F32>([&](int) { return x; });
}
FRESHET_INLINE F32 load_f(const float* p) {
  F32 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
FRESHET_INLINE void store_f(float* p, F32 v) {
  std::memcpy(p, &v, sizeof v);
}
FRESHET_INLINE F32 add_f(F32 a, F32 b) {
  return each<F32>([&](int i) { return a.v[i] + b.v[i]; });
}
FRESHET_INLINE F32 sub_f(F32 a, F32 b) {
  return each<F32>([&](int i) { return a.v[i] - b.v[i]; });
}
FRESHET_INLINE F32 mul_f(F32 a, F32 b) {
  return each<F32>([&](int i) { return a.v[i] * b.v[i]; });
}
FRESHET_INLINE F32 fma_f(F32 a, F32 b, F32 c) {
  return each<F32>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
FRESHET_INLINE F32 load_f16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  return each<F32>([&](int i) { return f16_to_f32(h[i]); });
}
// 16 rows of two E4M3 values each. With exponent and mantissa moved to their positions in an F16,
// each reads as the value times 2^-8.
FRESHET_INLINE void load_e4m3(const void* p, F32& even, F32& odd) {
  uint8_t b[32];
  std::memcpy(b, p, sizeof b);
  const auto number = [](uint8_t code) {
    return f16_to_f32(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7));
  };
  even = each<F32>([&](int i) { return number(b[2 * i]); });
  odd = each<F32>([&](int i) { return number(b[2 * i + 1]); });
}

FRESHET_INLINE I32 zero_i() {
  return {};
}
FRESHET_INLINE I32 set_i(int32_t x) {
  return each<I32>([&](int) { return x; });
}
FRESHET_INLINE I32 load_i(const void* p) {
  I32 r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
FRESHET_INLINE void store_i(void* p, I32 v) {
  std::memcpy(p, &v, sizeof v);
}
FRESHET_INLINE I32 load_u8(const void* p) {
  return each<I32>([&](int i) { return static_cast<const uint8_t*>(p)[i]; });
}
FRESHET_INLINE I32 load_u16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  return each<I32>([&](int i) { return h[i]; });
}
FRESHET_INLINE int32_t wrap(uint32_t x) {
  return static_cast<int32_t>(x);
}
FRESHET_INLINE uint32_t raw(int32_t x) {
  return static_cast<uint32_t>(x);
}
FRESHET_INLINE I32 add_i(I32 a, I32 b) {
  return each<I32>([&](int i) { return wrap(raw(a.v[i]) + raw(b.v[i])); });
}
FRESHET_INLINE I32 sub_i(I32 a, I32 b) {
  return each<I32>([&](int i) { return wrap(raw(a.v[i]) - raw(b.v[i])); });
}
FRESHET_INLINE I32 and_i(I32 a, I32 b) {
  return each<I32>([&](int i) { return a.v[i] & b.v[i]; });
}
FRESHET_INLINE I32 or_i(I32 a, I32 b) {
  return each<I32>([&](int i) { return a.v[i] | b.v[i]; });
}
FRESHET_INLINE I32 xor_i(I32 a, I32 b) {
  return each<I32>([&](int i) { return a.v[i] ^ b.v[i]; });
}
FRESHET_INLINE I32 shl(I32 a, int n) {
  return each<I32>([&](int i) { return wrap(raw(a.v[i]) << n); });
}
FRESHET_INLINE I32 shr(I32 a, int n) {
  return each<I32>([&](int i) { return wrap(raw(a.v[i]) >> n); });
}
FRESHET_INLINE I32 sar(I32 a, int n) {
  return each<I32>([&](int i) { return a.v[i] >> n; });
}
// sum + the products of the signed 16-bit halves of each lane.
FRESHET_INLINE I32 add_madd_i(I32 sum, I32 a, I32 b) {
  return each<I32>([&](int i) {
    return sum.v[i] + static_cast<int16_t>(a.v[i]) * static_cast<int16_t>(b.v[i]) +
           (a.v[i] >> 16) * (b.v[i] >> 16);
  });
}
FRESHET_INLINE I32 max_i(I32 a, I32 b) {
  return each<I32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
FRESHET_INLINE int32_t reduce_max(I32 a) {
  int32_t m = a.v[0];
  for (int i = 1; i < 16; ++i) m = a.v[i] > m ? a.v[i] : m;
  return m;
}
// Sums of each 16 of 256 signed bytes.
FRESHET_INLINE void sums_of_16(const uint8_t* bytes, int32_t (&sum)[16]) {
  for (int g = 0; g < 16; ++g) {
    sum[g] = 0;
    for (int i = 0; i < 16; ++i) sum[g] += static_cast<int8_t>(bytes[g * 16 + i]);
  }
}
FRESHET_INLINE I32 bits_i(F32 a) {
  I32 r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
// Rounds to the nearest integer, ties to even. |a| < 2^22.
FRESHET_INLINE I32 round_i(F32 a) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: above it a float has no fraction
  return each<I32>([&](int i) { return static_cast<int32_t>((a.v[i] + kMagic) - kMagic); });
}
// Swaps the middle two of every four values.
FRESHET_INLINE I32 swap_middle(I32 a) {
  return each<I32>([&](int i) { return a.v[(i & 12) | (i & 1) << 1 | (i >> 1 & 1)]; });
}
FRESHET_INLINE void store_i8(void* p, I32 a) {
  for (int i = 0; i < 16; ++i) static_cast<int8_t*>(p)[i] = static_cast<int8_t>(a.v[i]);
}
FRESHET_INLINE void store_u16(void* p, I32 a) {
  uint16_t h[16];
  for (int i = 0; i < 16; ++i) h[i] = static_cast<uint16_t>(a.v[i]);
  std::memcpy(p, h, sizeof h);
}
FRESHET_INLINE F32 to_f(I32 a) {
  return each<F32>([&](int i) { return static_cast<float>(a.v[i]); });
}
FRESHET_INLINE F32 bits_f(I32 a) {
  F32 r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
// Each byte of `index`, in 0 .. 15, becomes table[index].
FRESHET_INLINE I32 look_up(const int8_t* table, I32 index) {
  uint8_t b[64];
  std::memcpy(b, &index, sizeof b);
  for (uint8_t& x : b) x = static_cast<uint8_t>(table[x]);
  return load_i(b);
}
// The level with the index in the low four bits of each lane.
FRESHET_INLINE F32 level_at(const float (&levels)[16], I32 index) {
  return each<F32>([&](int i) { return levels[index.v[i] & 15]; });
}
// Lane i becomes table[index of lane i].
FRESHET_INLINE I32 gather(const uint32_t* table, I32 index) {
  return each<I32>([&](int i) { return static_cast<int32_t>(table[index.v[i]]); });
}

// Whether dot_group() exists, see dot_quads.inl.
inline constexpr bool kSumsStart = false;
// Whether dot_flipped() exists, see simd_avx2.h.
inline constexpr bool kFlipsSigns = false;
// Converts a scale to the form that dot_scaled expects for lines whose bytes are at most kTop.
template <int kTop>
FRESHET_INLINE Scale make_scale(I32 s) {
  return s;
}

// sum + the products of the line's bytes (signed, or flipped, see kFlipSigned) and four values
// within +-127, the same for each lane. Wraps.
FRESHET_INLINE I32 dot_quad(I32 sum, I32 line, const int8_t* x) {
  int8_t b[64];
  std::memcpy(b, &line, sizeof b);
  return each<I32>([&](int i) {
    int d = 0;
    for (int j = 0; j < 4; ++j) d += b[4 * i + j] * x[j];
    return wrap(raw(sum.v[i]) + raw(d));
  });
}

// sum[t] += scale * (lines [first, first + kQuads) of w times x[t]). Bytes of a line are unsigned,
// at most kTop; kTop = 0: signed (or flipped, see kFlipSigned).
template <int T, int kQuads, int kTop, class Lines>
FRESHET_INLINE void dot_scaled(I32 (&sum)[T], Scale scale, const Lines& w, int first,
                               const int8_t* const (&x)[T]) {
  for (int p = 0; p < kQuads; ++p) {
    const I32 line = w.line(first + p);
    int8_t b[64];
    std::memcpy(b, &line, sizeof b);
    for (int t = 0; t < T; ++t) {
      const int8_t* q = x[t] + 4 * p;
      for (int i = 0; i < 16; ++i) {
        int d = 0;
        for (int j = 0; j < 4; ++j) d += b[4 * i + j] * q[j];
        sum[t].v[i] =
            wrap(raw(sum[t].v[i]) + raw(scale.v[i]) * raw(d));  // the scale may be NaN or inf
      }
    }
  }
}

// sum[t] += lines [0, kQuads) of w times x[t].
template <int T, int kQuads, int kTop, class Lines>
FRESHET_INLINE void dot_plain(I32 (&sum)[T], const Lines& w, const int8_t* const (&x)[T]) {
  dot_scaled<T, kQuads, kTop>(sum, set_i(1), w, 0, x);
}

}  // namespace
}  // namespace freshet::cpu

// dot_scaled() with an instruction that adds four byte products to each lane (VNNI, NEON).
//
// Include this at the end of a simd_*.h that defines kPairScales, dot_quad(sum, line, x), which
// multiplies the line's bytes by four activations (the same for each lane), and add_mul_i(sum, x,
// y). FRESHET_DOT, if defined, is the attribute of the functions here.
//
// VNNI takes three slow instructions to scale and add a 32-bit sum. A sum that fits in 16 bits
// takes one, vpdpwssd, with a scale whose upper half is zero (kPairScales).
//
// Sums of values that are 2^kShift too high start at minus 2^kShift times the sum of their
// activations. So nothing has to be subtracted later, and the sum of 32 4-bit values fits in 16
// bits.
#pragma once

#ifndef FRESHET_DOT
#define FRESHET_DOT FRESHET_INLINE
#endif

namespace freshet::cpu {
namespace {

// How many quads of products (u8 up to kTop times a value within +-127) can be added within 16
// bits; 0 if sums are scaled as 32 bits, because fewer than two quads gain nothing.
template <int kTop>
inline constexpr int kQuadsIn16Bits = kPairScales && kTop > 0 && kTop * 127 * 8 <= 32767
                                          ? 32767 / (kTop * 127 * 4)
                                          : 0;

template <int kTop>
FRESHET_INLINE Scale make_scale(I32 s) {
  return kQuadsIn16Bits<kTop> > 0 ? and_i(s, set_i(0xffff)) : s;
}

inline constexpr bool kSumsStart = true;
template <class F>
inline constexpr int kGreatest =
    F::kTop > 2 << F::kShift ? F::kTop - (1 << F::kShift) : 1 << F::kShift;
template <class F>
inline constexpr bool kGroupIn16Bits = kPairScales && F::kGroup * kGreatest<F> * 127 <= 32767;

template <class F>
FRESHET_INLINE Scale make_group_scale(I32 s) {
  return kGroupIn16Bits<F> ? and_i(s, set_i(0xffff)) : s;
}
// sum[t] += scale * (start[t] + lines [first, first + F::kGroup / 4) of w times x[t]).
template <class F, int T, class Lines>
FRESHET_DOT void dot_group(I32 (&sum)[T], Scale scale, const Lines& w, int first,
                           const int8_t* const (&x)[T], const I32 (&start)[T]) {
  I32 d[T];
  FRESHET_UNROLL
  for (int t = 0; t < T; ++t) d[t] = start[t];
  FRESHET_UNROLL
  for (int i = 0; i < F::kGroup / 4; ++i) {
    const I32 line = w.line(first + i);
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) d[t] = dot_quad(d[t], line, x[t] + 4 * i);
  }
  FRESHET_UNROLL
  for (int t = 0; t < T; ++t) {
    sum[t] = kGroupIn16Bits<F> ? add_madd_i(sum[t], d[t], scale) : add_mul_i(sum[t], d[t], scale);
  }
}

template <int T, int kQuads, int kTop, class Lines>
FRESHET_DOT void dot_scaled(I32 (&sum)[T], Scale scale, const Lines& w, int first,
                            const int8_t* const (&x)[T]) {
  constexpr int kFit = kQuadsIn16Bits<kTop>;
  constexpr int kStep = kFit == 0 || kFit > kQuads ? kQuads : kFit;
  static_assert(kQuads % kStep == 0);
  FRESHET_UNROLL
  for (int p = 0; p < kQuads; p += kStep) {
    I32 d[T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) d[t] = zero_i();
    FRESHET_UNROLL
    for (int i = p; i < p + kStep; ++i) {
      const I32 line = w.line(first + i);
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) d[t] = dot_quad(d[t], line, x[t] + 4 * i);
    }
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      sum[t] = kFit > 0 ? add_madd_i(sum[t], d[t], scale) : add_mul_i(sum[t], d[t], scale);
    }
  }
}

// sum[t] += lines [0, kQuads) of w times x[t].
template <int T, int kQuads, int kTop, class Lines>
FRESHET_DOT void dot_plain(I32 (&sum)[T], const Lines& w, const int8_t* const (&x)[T]) {
  FRESHET_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    const I32 line = w.line(i);
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) sum[t] = dot_quad(sum[t], line, x[t] + 4 * i);
  }
}

}  // namespace
}  // namespace freshet::cpu

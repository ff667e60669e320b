// Blocks of 32 as numbers: what kernels that multiply BF16 use. A number of a block is a whole one,
// exact in BF16, times the scale of its group (of 16 or 32) in F32, plus an offset a group.
// Included after matmul_tiles.inl with AVX-512 underneath.
#pragma once

#include "backend/cpu/matmul_tiles.inl"

namespace freshet::cpu {
namespace {

// Formats whose number is a function of four bits (or of fewer, its neighbours' bits above them).
template <class F>
constexpr bool is_direct() {
  switch (F::kFormat) {
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kIQ4_NL:
    case Format::kMXFP4:
    case Format::kQ2_K:
    case Format::kQ4_K:
    case Format::kIQ4_XS:
      return true;
    default:
      return false;
  }
}
template <class F>
constexpr int level(int bits) {
  switch (F::kFormat) {
    case Format::kQ4_0:
      return bits - 8;
    case Format::kIQ4_NL:
    case Format::kIQ4_XS:
      return kIq4Levels[bits];
    case Format::kMXFP4:
      return kE2M1Levels[bits] - 16;
    case Format::kQ2_K:
      return bits & 3;
    default:
      return bits;
  }
}
// What the unsigned bytes of a line of other formats are too high by.
template <class F>
inline constexpr int kExcess = F::kShift > 0 ? 1 << F::kShift : 0;

template <class F>
struct Levels {
  alignas(64) float f32[16];
  alignas(64) uint16_t bf16[32];
};
template <class F>
constexpr Levels<F> make_levels() {
  Levels<F> l{};
  for (int i = 0; i < 32; ++i) {
    const float f = static_cast<float>(level<F>(i & 15));
    l.f32[i & 15] = f;
    l.bf16[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, f) >> 16);
  }
  return l;
}
template <class F>
inline constexpr Levels<F> kLevels = make_levels<F>();

// The four numbers of quad p of each row: v[j] is k = 4 p + j.
template <class F, class Lines>
FRESHET_INLINE void quad_values(const Lines& lines, int p, F32 (&v)[4]) {
  if constexpr (is_direct<F>()) {
    const F32 table = _mm512_load_ps(kLevels<F>.f32);
    const I32 raw = lines.raw(p);
    FRESHET_UNROLL
    for (int j = 0; j < 4; ++j) {
      v[j] = _mm512_permutexvar_ps(shr(raw, lines.at(p) + 8 * j), table);
    }
  } else {
    // The byte becomes the last of 2^23 as F32: no conversion is exact and as cheap.
    const I32 line = lines.line(p);
    const I32 two23 = set_i(0x4b000000);
    const F32 excess = set_f(8388608.0f + static_cast<float>(kExcess<F>));
    FRESHET_UNROLL
    for (int j = 0; j < 4; ++j) {
      const I32 pick = _mm512_broadcast_i32x4(_mm_setr_epi32(j, 4 + j, 8 + j, 12 + j));
      v[j] = sub_f(bits_f(_mm512_mask_shuffle_epi8(two23, 0x1111111111111111, line, pick)), excess);
    }
  }
}

// Quad p as two rows of a BF16 tile: k = 4 p + 0 and 2, then 1 and 3.
template <class F, class Lines>
FRESHET_INLINE void quad_words(const Lines& lines, int p, I32& even, I32& odd) {
  if constexpr (is_direct<F>()) {
    const I32 table = _mm512_load_si512(kLevels<F>.bf16);
    const I32 raw = lines.raw(p);
    even = _mm512_permutexvar_epi16(shr(raw, lines.at(p)), table);
    odd = _mm512_permutexvar_epi16(shr(raw, lines.at(p) + 8), table);
  } else {
    F32 v[4];
    quad_values<F>(lines, p, v);
    const I32 high = set_i(static_cast<int32_t>(0xffff0000));
    even = or_i(shr(bits_i(v[0]), 16), and_i(bits_i(v[2]), high));
    odd = or_i(shr(bits_i(v[1]), 16), and_i(bits_i(v[3]), high));
  }
}

// A packed panel as blocks of 32: block b is number b % kParts of a stored block.
template <class F>
struct Values {
  using Panel = Packed<F>;
  static constexpr int kParts = Panel::kLayout.block / 32;
  static constexpr bool groups_of_16() {
    if constexpr (kParts > 1) return F::kGroup == 16;
    return false;
  }
  static constexpr int kHalves = groups_of_16() ? 2 : 1;  // groups a block

  FRESHET_INLINE auto lines(const Panel& w, int64_t stored, int part) {
    if constexpr (kParts > 1) {
      return F::sub(w.main(stored), part);
    } else {
      return F::lines(w.main(stored));
    }
  }
  FRESHET_INLINE F32 scale(const Panel& w, int64_t stored, int part, int half) {
    if constexpr (kParts > 1) {
      const I32 s = F::group_scale(w.main(stored), part * kHalves + half);
      return mul_f(F::d(w.main(stored), w.tail(stored)), to_f(s));
    } else {
      return F::scale(w.main(stored), w.tail(stored));
    }
  }
  FRESHET_INLINE F32 low(const Panel& w, int64_t stored, int part, int half) {
    if constexpr (kParts > 1) {
      const int g = part * kHalves + half;
      const I32 m = unsigned_byte(F::min_bytes(w.main(stored), g / 4), g % 4);
      return mul_f(F::dmin(w.main(stored)), to_f(sub_i(zero_i(), m)));
    } else {
      return F::low(w.main(stored));
    }
  }
};

FRESHET_INLINE float group_sum(const uint8_t* sums, int64_t b, int halves, int half) {
  const uint8_t* at = sums + b * 8;
  return halves == 2 ? f32_at(at + 4 * half) : f32_at(at) + f32_at(at + 4);
}

// T rows times one panel, blocks [b0, b1) of 32, straight from its packed form. x[t]: F32 of the
// planes from block b0 on; sums[t]: the row's sums of 16 (kAffine). The order of the sums is that
// of a BF16 tile multiplication for each group, then acc = fma(group, scale, acc).
template <class F, int T, int kPlanes>
FRESHET_INLINE void part_values(const Packed<F>& w, int64_t stored, int part,
                                const float* const (&x)[T], const uint8_t* const (&sums)[T],
                                F32 (&acc)[T]) {
  using V = Values<F>;
  constexpr int kRows = T * kPlanes, kQuads = 8 / V::kHalves;
  const auto lines = V::lines(w, stored, part);
  FRESHET_UNROLL
  for (int h = 0; h < V::kHalves; ++h) {
    F32 even[kRows], odd[kRows];
    FRESHET_UNROLL
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = zero_f();
    FRESHET_UNROLL
    for (int p = h * kQuads; p < (h + 1) * kQuads; ++p) {
      F32 v[4];
      quad_values<F>(lines, p, v);
      FRESHET_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float* at = x[r / kPlanes] + r % kPlanes * 32 + 4 * p;
        even[r] = fma_f(v[0], set_f(at[0]), even[r]);
        odd[r] = fma_f(v[2], set_f(at[1]), odd[r]);
        even[r] = fma_f(v[1], set_f(at[2]), even[r]);
        odd[r] = fma_f(v[3], set_f(at[3]), odd[r]);
      }
    }
    const F32 scale = V::scale(w, stored, part, h);
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      F32 sum = add_f(even[t * kPlanes], odd[t * kPlanes]);
      if constexpr (kPlanes == 2) sum = add_f(sum, add_f(even[t * 2 + 1], odd[t * 2 + 1]));
      acc[t] = fma_f(sum, scale, acc[t]);
      if constexpr (F::kAffine) {
        const float s = group_sum(sums[t], 0, V::kHalves, h);
        acc[t] = fma_f(V::low(w, stored, part, h), set_f(s), acc[t]);
      }
    }
  }
}

template <class F, int T, int kPlanes>
FRESHET_INLINE void tile_values(const Packed<F>& w, const uint8_t* const (&x)[T],
                                const uint8_t* const (&sums)[T], int64_t b0, int64_t b1,
                                F32 (&acc)[T]) {
  constexpr int kParts = Values<F>::kParts;
  constexpr int kAheadLines = (panel_layout(F::kFormat).main / kLine + kParts - 1) / kParts;
  for (int64_t b = b0; b < b1; b += kParts) {
    FRESHET_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const int64_t stored = b / kParts;
      prefetch_lines<kAheadLines>(w.main(stored) + part * kAheadLines * kLine + kAhead);
      const float* from[T];
      const uint8_t* s[T];
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) {
        from[t] = reinterpret_cast<const float*>(x[t]) + (b - b0 + part) * 32 * kPlanes;
        s[t] = sums[t] + (b + part) * 8;
      }
      part_values<F, T, kPlanes>(w, stored, part, from, s, acc);
    }
  }
}

}  // namespace
}  // namespace freshet::cpu

// A tile: T activation rows times one panel, over blocks [b0, b1).
//
// Numbers add up in one order, whatever T, the instruction set, or where the lines come from: exact
// whole-number sums of a block (of 32 or 256), then acc = fma(sum, d_weight * d_x, acc) block after
// block, and the part of an affine format's offset after it.
#pragma once

#include "backend/cpu/matmul_blocks.inl"
#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_layout.h"

namespace freshet::cpu {
namespace {

// Bytes that a packed panel is read ahead; tuned for the matrix-vector product.
inline constexpr int kAhead = 2048;

template <int N>
FRESHET_INLINE void prefetch_lines(const uint8_t* p) {
  FRESHET_UNROLL
  for (int i = 0; i < N; ++i) prefetch(p + i * kLine);
}

FRESHET_INLINE float f32_at(const uint8_t* p) {
  float f;
  std::memcpy(&f, p, 4);
  return f;
}
FRESHET_INLINE int32_t i32_at(const uint8_t* p) {
  int32_t i;
  std::memcpy(&i, p, 4);
  return i;
}

// Blocks as they are packed.
template <class F>
struct Packed {
  using Block = F;
  static constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  const uint8_t* main_part;
  const uint8_t* tail_part;
  Packed(const MatmulCall& c, int64_t panel)
      : main_part(c.packed + panel * panel_bytes(kLayout, c.cols)),
        tail_part(main_part + blocks_of(c.cols, kLayout.block) * kLayout.main) {}
  FRESHET_INLINE_MEMBER const uint8_t* main(int64_t b) const {
    return main_part + b * kLayout.main;
  }
  FRESHET_INLINE_MEMBER const uint8_t* tail(int64_t b) const {
    return tail_part + b * kLayout.tail;
  }
};

template <class F>
struct Packed32 : Packed<F> {
  using Packed<F>::Packed;
  FRESHET_INLINE_MEMBER auto lines(int64_t b) const { return F::lines(this->main(b)); }
  FRESHET_INLINE_MEMBER F32 scale(int64_t b) const {
    return F::scale(this->main(b), this->tail(b));
  }
  FRESHET_INLINE_MEMBER F32 low(int64_t b) const { return F::low(this->main(b)); }
  FRESHET_INLINE_MEMBER void ahead(int64_t b) const {
    prefetch_lines<panel_layout(F::kFormat).main / kLine>(this->main(b) + kAhead);
  }
};

struct WholeLines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const { return line_at(p, i); }
};

// Blocks unpacked to a byte a number: 8 lines, scale (and low) as F32. Serves many tokens.
template <class F>
struct Unpacked32 {
  using Block = F;
  static constexpr int64_t kBytes = (9 + (F::kAffine ? 1 : 0)) * kLine;
  const uint8_t* data;
  FRESHET_INLINE_MEMBER WholeLines lines(int64_t b) const { return {data + b * kBytes}; }
  FRESHET_INLINE_MEMBER F32 scale(int64_t b) const { return bits_f(line_at(data + b * kBytes, 8)); }
  FRESHET_INLINE_MEMBER F32 low(int64_t b) const { return bits_f(line_at(data + b * kBytes, 9)); }
  FRESHET_INLINE_MEMBER void ahead(int64_t) const {}

  static void unpack(const Packed32<F>& from, int64_t b0, int64_t b1, uint8_t* to) {
    for (int64_t b = b0; b < b1; ++b, to += kBytes) {
      const auto lines = from.lines(b);
      FRESHET_UNROLL
      for (int i = 0; i < 8; ++i) store_i(to + i * kLine, lines.line(i));
      store_f(reinterpret_cast<float*>(to + 8 * kLine), from.scale(b));
      if constexpr (F::kAffine) store_f(reinterpret_cast<float*>(to + 9 * kLine), from.low(b));
    }
  }
};

// The planes of an activation row that a product uses count as rows of their own until their
// whole-number sums are complete: plane p of token t is row t * kPlanes + p.
template <int kPlanes>
FRESHET_INLINE F32 join_planes(const I32* sum) {
  if constexpr (kPlanes == 1) return to_f(sum[0]);
  return fma_f(to_f(sum[0]), set_f(kFineSteps), to_f(sum[1]));
}

template <class Source, int T, int kPlanes>
FRESHET_INLINE void tile32(const Source& w, const Q8x32Layout& l, const uint8_t* const (&row)[T],
                           int64_t b0, int64_t b1, F32 (&acc)[T]) {
  using F = typename Source::Block;
  constexpr int kRows = T * kPlanes;
  const int64_t minus_sum[2] = {l.minus_sum, l.minus_sum_fine};
  for (int64_t b = b0; b < b1; ++b) {
    w.ahead(b - b0);
    I32 sum[kRows];
    const int8_t* x[kRows];
    FRESHET_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* const from = row[r / kPlanes];
      const int plane = r % kPlanes;
      x[r] = reinterpret_cast<const int8_t*>(from) + plane * l.fine + b * 32;
      sum[r] =
          F::kShift > 0 ? shl(set_i(i32_at(from + minus_sum[plane] + b * 4)), F::kShift) : zero_i();
    }
    dot<kRows, 8, F::kTop>(sum, w.lines(b - b0), 0, x);
    F32 d = w.scale(b - b0);
    if constexpr (kPlanes == 2) d = mul_f(d, set_f(1.0f / kFineSteps));
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      const F32 joined = join_planes<kPlanes>(sum + t * kPlanes);
      acc[t] = fma_f(joined, mul_f(d, set_f(f32_at(row[t] + l.d + b * 4))), acc[t]);
      if constexpr (F::kAffine) {
        const int64_t s = kPlanes == 2 ? l.s_fine : l.s;
        acc[t] = fma_f(w.low(b - b0), set_f(f32_at(row[t] + s + b * 4)), acc[t]);
      }
    }
  }
}

// Pairs of the offsets of groups, as 16-bit halves, in the order of the sums of Q8x256Record.
template <class F>
FRESHET_INLINE I32 offset_pair(const uint8_t* main, int i) {
  if constexpr (F::kAffine) {
    const I32 m = F::min_bytes(main, i / 2);
    return and_i(i % 2 ? shr(m, 8) : m, set_i(0x00ff00ff));
  } else {
    const int g = i / 2 * 4 + i % 2;
    const I32 a = F::group_scale(main, g), b = F::group_scale(main, g + 2);
    return or_i(and_i(shl(a, F::kShift), set_i(0xffff)), shl(b, F::kShift + 16));
  }
}
template <class F>
inline constexpr int kOffsetPairs = F::kAffine || F::kShift > 0 ? 128 / F::kGroup : 0;

template <class F>
struct Packed256 : Packed<F> {
  using Packed<F>::Packed;
  FRESHET_INLINE_MEMBER auto sub(int64_t b, int j) const { return F::sub(this->main(b), j); }
  FRESHET_INLINE_MEMBER Scale scale(int64_t b, int g) const {
    return make_scale(F::group_scale(this->main(b), g));
  }
  FRESHET_INLINE_MEMBER I32 pair(int64_t b, int i) const {
    return offset_pair<F>(this->main(b), i);
  }
  FRESHET_INLINE_MEMBER F32 d(int64_t b) const { return F::d(this->main(b), this->tail(b)); }
  FRESHET_INLINE_MEMBER F32 dmin(int64_t b) const { return F::dmin(this->main(b)); }
  FRESHET_INLINE_MEMBER void ahead(int64_t b, int j) const {
    constexpr int kEighth = (panel_layout(F::kFormat).main / kLine + 7) / 8;
    prefetch_lines<kEighth>(this->main(b) + j * kEighth * kLine + kAhead);
  }
};

// A block unpacked to 64 lines, a scale a group, the offsets' pairs, d (and dmin) as F32.
template <class F>
struct Unpacked256 {
  using Block = F;
  static constexpr int kGroups = 256 / F::kGroup;
  static constexpr int kScaleLine = 64, kPairLine = kScaleLine + kGroups,
                       kDLine = kPairLine + kOffsetPairs<F>;
  static constexpr int64_t kBytes = (kDLine + (F::kAffine ? 2 : 1)) * kLine;
  const uint8_t* data;
  FRESHET_INLINE_MEMBER I32 at(int64_t b, int i) const { return line_at(data + b * kBytes, i); }
  FRESHET_INLINE_MEMBER WholeLines sub(int64_t b, int j) const {
    return {data + b * kBytes + j * 8 * kLine};
  }
  FRESHET_INLINE_MEMBER Scale scale(int64_t b, int g) const { return at(b, kScaleLine + g); }
  FRESHET_INLINE_MEMBER I32 pair(int64_t b, int i) const { return at(b, kPairLine + i); }
  FRESHET_INLINE_MEMBER F32 d(int64_t b) const { return bits_f(at(b, kDLine)); }
  FRESHET_INLINE_MEMBER F32 dmin(int64_t b) const { return bits_f(at(b, kDLine + 1)); }
  FRESHET_INLINE_MEMBER void ahead(int64_t, int) const {}

  static void unpack(const Packed256<F>& from, int64_t b0, int64_t b1, uint8_t* to) {
    for (int64_t b = b0; b < b1; ++b, to += kBytes) {
      FRESHET_UNROLL
      for (int j = 0; j < 8; ++j) {
        const auto lines = from.sub(b, j);
        FRESHET_UNROLL
        for (int i = 0; i < 8; ++i) store_i(to + (j * 8 + i) * kLine, lines.line(i));
      }
      FRESHET_UNROLL
      for (int g = 0; g < kGroups; ++g) store_i(to + (kScaleLine + g) * kLine, from.scale(b, g));
      FRESHET_UNROLL
      for (int i = 0; i < kOffsetPairs<F>; ++i) {
        store_i(to + (kPairLine + i) * kLine, from.pair(b, i));
      }
      store_f(reinterpret_cast<float*>(to + kDLine * kLine), from.d(b));
      if constexpr (F::kAffine) {
        store_f(reinterpret_cast<float*>(to + (kDLine + 1) * kLine), from.dmin(b));
      }
    }
  }
};

template <class Source, int T>
FRESHET_INLINE void sub256(const Source& w, int64_t b, int j, const int8_t* const (&row)[T],
                           I32 (&sum)[T]) {
  using F = typename Source::Block;
  const int8_t* x[T];
  FRESHET_UNROLL
  for (int t = 0; t < T; ++t) x[t] = row[t] + j * 32;
  const auto lines = w.sub(b, j);
  if constexpr (F::kGroup == 32) {
    dot_scaled<T, 8, F::kTop>(sum, w.scale(b, j), lines, 0, x);
  } else {
    dot_scaled<T, 4, F::kTop>(sum, w.scale(b, 2 * j), lines, 0, x);
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) x[t] += 16;
    dot_scaled<T, 4, F::kTop>(sum, w.scale(b, 2 * j + 1), lines, 4, x);
  }
}

template <class Source, int T, int kPlanes>
FRESHET_INLINE void tile256(const Source& w, const Q8x256Layout& l, const uint8_t* const (&row)[T],
                            int64_t b0, int64_t b1, F32 (&acc)[T]) {
  using F = typename Source::Block;
  constexpr int kRows = T * kPlanes;
  constexpr bool kFromPacked = sizeof(Source) > sizeof(void*);
  for (int64_t b = b0; b < b1; ++b) {
    I32 sum[kRows], offset[kRows];
    const int8_t* x[kRows];
    const uint8_t* record[kRows];
    FRESHET_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* const from = row[r / kPlanes];
      const int plane = r % kPlanes;
      x[r] = reinterpret_cast<const int8_t*>(from) + plane * l.fine + b * 256;
      record[r] = from + l.records + (b * 2 + plane) * kLine;
      sum[r] = offset[r] = zero_i();
    }
    if constexpr (kFromPacked) {  // where a number's bits lie depends on j: known to the compiler
      FRESHET_UNROLL
      for (int j = 0; j < 8; ++j) {
        w.ahead(b - b0, j);
        sub256<Source, kRows>(w, b - b0, j, x, sum);
      }
    } else {
      for (int j = 0; j < 8; ++j) sub256<Source, kRows>(w, b - b0, j, x, sum);
    }
    constexpr int64_t kSums =
        F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
    FRESHET_UNROLL
    for (int i = 0; i < kOffsetPairs<F>; ++i) {
      const I32 pair = w.pair(b - b0, i);
      FRESHET_UNROLL
      for (int r = 0; r < kRows; ++r) {
        offset[r] = add_i(offset[r], madd_i(pair, set_i(i32_at(record[r] + kSums + 4 * i))));
      }
    }
    const F32 d = w.d(b - b0);
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      const uint8_t* const last = record[t * kPlanes + kPlanes - 1];
      const F32 scale = mul_f(d, set_f(f32_at(last)));
      I32* const s = sum + t * kPlanes;
      const I32* const o = offset + t * kPlanes;
      if constexpr (F::kAffine) {
        acc[t] = fma_f(join_planes<kPlanes>(s), scale, acc[t]);
        const F32 down = mul_f(w.dmin(b - b0), set_f(f32_at(last + 4)));
        acc[t] = fma_f(join_planes<kPlanes>(o), down, acc[t]);
      } else {
        FRESHET_UNROLL
        for (int p = 0; p < kPlanes; ++p) s[p] = sub_i(s[p], o[p]);
        acc[t] = fma_f(join_planes<kPlanes>(s), scale, acc[t]);
      }
    }
  }
}

// Weights that are numbers: blocks of 32 k. Products of even and of odd k add up apart, then
// together to the sum so far: what AMX does with BF16 tiles.
struct LinesF32 {
  static constexpr Format kFormat = Format::kF32;
  FRESHET_INLINE void pair(const uint8_t* p, int i, F32& even, F32& odd) {
    even = bits_f(line_at(p, 2 * i));
    odd = bits_f(line_at(p, 2 * i + 1));
  }
};
struct LinesF16 {
  static constexpr Format kFormat = Format::kF16;
  FRESHET_INLINE void pair(const uint8_t* p, int i, F32& even, F32& odd) {
    even = load_f16(p + i * kLine);
    odd = load_f16(p + i * kLine + 32);
  }
};
// x holds F32 of both planes, one after the other for each block of 32.
struct LinesBF16 {
  static constexpr Format kFormat = Format::kBF16;
  FRESHET_INLINE void pair(const uint8_t* p, int i, F32& even, F32& odd) {
    const I32 v = line_at(p, i);
    even = bits_f(shl(v, 16));
    odd = bits_f(and_i(v, set_i(static_cast<int32_t>(0xffff0000))));
  }
};

// x[t]: F32 numbers from the first block's on; with two planes a block's 32 of each.
template <class F, int T, int kPlanes = 1>
FRESHET_INLINE void tile_float(const Packed<F>& w, const uint8_t* const (&x)[T], int64_t b0,
                               int64_t b1, F32 (&acc)[T]) {
  constexpr int kRows = T * kPlanes;
  constexpr int kPairBytes = Packed<F>::kLayout.main / 16;
  for (int64_t b = b0; b < b1; ++b) {
    const uint8_t* p = w.main(b);
    const int64_t at = (b - b0) * 128 * kPlanes;
    F32 even[kRows], odd[kRows];
    FRESHET_UNROLL
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = zero_f();
    FRESHET_UNROLL
    for (int i = 0; i < 16; ++i) {
      prefetch_lines<kPairBytes / kLine>(p + i * kPairBytes + kAhead);
      F32 we, wo;
      F::pair(p, i, we, wo);
      FRESHET_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const uint8_t* const from = x[r / kPlanes] + at + r % kPlanes * 128 + 8 * i;
        even[r] = fma_f(we, set_f(f32_at(from)), even[r]);
        odd[r] = fma_f(wo, set_f(f32_at(from + 4)), odd[r]);
      }
    }
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      F32 sum = add_f(even[t * kPlanes], odd[t * kPlanes]);
      if constexpr (kPlanes == 2) {
        acc[t] = add_f(acc[t], sum);
        sum = add_f(even[t * 2 + 1], odd[t * 2 + 1]);
      }
      acc[t] = add_f(acc[t], sum);
    }
  }
}

}  // namespace
}  // namespace freshet::cpu

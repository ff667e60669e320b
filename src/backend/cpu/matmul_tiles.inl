// The tile kernel: T activation rows times one panel, over blocks [b0, b1).
//
// The order of sums is the same for every T and instruction set, and for packed and unpacked lines:
// exact integer sums of a block of 256, then acc = fma(sum, d_weight * d_x, acc) block by block,
// and after each block the offset's part for an affine format.
#pragma once

#include <type_traits>

#include "backend/cpu/matmul_blocks.inl"
#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_layout.h"
#include "quant/levels4.h"

namespace freshet::cpu {
namespace {

// Prefetch distance in a packed panel, in bytes; tuned for GEMV.
inline constexpr int kAhead = 4096;

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

// The packed blocks of a panel.
template <class F>
struct Packed {
  using Block = F;
  static constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  const uint8_t* main_part;
  const uint8_t* tail_part;
  const uint8_t* end;  // start of the next panel
  Packed(const MatmulCall& c, int64_t panel)
      : main_part(c.packed + panel * panel_bytes(kLayout, c.cols)),
        tail_part(main_part + blocks_of(c.cols, kLayout.block) * kLayout.main),
        end(main_part + panel_bytes(kLayout, c.cols)) {}
  FRESHET_INLINE_MEMBER const uint8_t* main(int64_t b) const {
    return main_part + b * kLayout.main;
  }
  FRESHET_INLINE_MEMBER const uint8_t* tail(int64_t b) const {
    return tail_part + b * kLayout.tail;
  }
};

struct WholeLines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const { return line_at(p, i); }
};

// Each plane of an activation row that a GEMM uses counts as a row of its own until its integer
// sums are complete: plane p of token t is row t * kPlanes + p.
template <int kPlanes>
FRESHET_INLINE F32 join_planes(const I32* sum) {
  if constexpr (kPlanes == 1) return to_f(sum[0]);
  return fma_f(to_f(sum[0]), set_f(kFineSteps), to_f(sum[1]));
}

// Whether the sums of a group start at the correction for values that are 2^kShift too high. If
// not, offsets are subtracted after each block, as for affine formats.
template <class F>
inline constexpr bool kStarts = kSumsStart && !F::kAffine && F::kShift > 0;
template <class F>
inline constexpr int kOffsetPairs =
    F::kAffine || (F::kShift > 0 && !kStarts<F>) ? 128 / F::kGroup : 0;
template <class F>
inline constexpr bool kOf32 = panel_layout(F::kFormat).block == 32;

template <class F>
inline constexpr bool kFlips = kFlipsSigns && F::kTop == 0;

template <class F>
FRESHET_INLINE Scale scale_of(I32 s) {
  if constexpr (kStarts<F>) {
    return make_group_scale<F>(s);
  } else {
    return make_scale<F::kTop>(s);
  }
}

// Packs the offsets of two groups as 16-bit halves.
FRESHET_INLINE I32 halves(I32 a, I32 b) {
  return or_i(and_i(a, set_i(0xffff)), shl(b, 16));
}
// Pair i holds the offsets of groups first_of_pair(i) and first_of_pair(i) + 2, in the order of the
// sums of Q8x256Record.
constexpr int first_of_pair(int i) {
  return i / 2 * 4 + i % 2;
}

// A packed block of 256.
template <class F>
struct PackedBlock {
  using Block = F;
  static constexpr bool kUnrolled = true;  // the bits of each 32 values are in different positions
  static constexpr bool kFlipped = false;
  const uint8_t* main;
  const uint8_t* tail;
  FRESHET_INLINE_MEMBER PackedBlock(const Packed<F>& from, int64_t b, int64_t)
      : main(from.main(b)), tail(from.tail(b)) {}
  static constexpr int subs() { return 8; }
  FRESHET_INLINE_MEMBER auto sub(int j) const { return F::sub(main, j); }
  FRESHET_INLINE_MEMBER I32 group_scale(int g) const { return F::group_scale(main, g); }
  FRESHET_INLINE_MEMBER Scale scale(int g) const { return scale_of<F>(group_scale(g)); }
  FRESHET_INLINE_MEMBER I32 pair(int i) const {
    if constexpr (F::kAffine) {
      const I32 m = F::min_bytes(main, i / 2);
      return and_i(i % 2 ? shr(m, 8) : m, set_i(0x00ff00ff));
    } else {
      const int g = first_of_pair(i);
      return halves(shl(group_scale(g), F::kShift), shl(group_scale(g + 2), F::kShift));
    }
  }
  FRESHET_INLINE_MEMBER F32 d() const { return F::d(main, tail); }
  FRESHET_INLINE_MEMBER F32 dmin() const { return F::dmin(main); }
  FRESHET_INLINE_MEMBER void ahead(int j) const {
    constexpr int kEighth = (panel_layout(F::kFormat).main / kLine + 7) / 8;
    prefetch_lines<kEighth>(main + j * kEighth * kLine + kAhead);
  }
};

// Prefetches for block j of eight: the main part kAhead bytes ahead; tails, which a group reads
// first, one group ahead to the L1 cache. Past a panel's end, it continues with the next panel.
template <class F>
FRESHET_INLINE void fetch_group_ahead(const Packed<F>& panel, const uint8_t* main,
                                      const uint8_t* tail, int j) {
  constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  const uint8_t* next = main + j * kLayout.main + kAhead;
  if (next >= panel.tail_part) next += panel.end - panel.tail_part;
  prefetch_lines<kLayout.main / kLine>(next);
  if (j * kLine >= 8 * kLayout.tail) return;
  next = tail + 8 * kLayout.tail + j * kLine;
  if (next >= panel.end) next += panel.tail_part - panel.main_part;
  prefetch_near(next);
}

// Eight blocks of 32 (fewer at the end of a row), used as one block of 256.
template <class F>
struct PackedGroup {
  using Block = F;
  static constexpr bool kUnrolled = true;  // scales stay in registers
  static constexpr bool kFlipped = false;
  static constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  static constexpr int kMinBits = 15;
  const uint8_t* main;
  const uint8_t* tail;
  const Packed<F>& panel;
  int count;
  I32 whole[8];
  I32 whole_low[F::kAffine ? 8 : 1];
  F32 unit;
  F32 low_unit;
  FRESHET_INLINE_MEMBER PackedGroup(const Packed<F>& from, int64_t b, int64_t blocks)
      : main(from.main(8 * b)),
        tail(from.tail(8 * b)),
        panel(from),
        count(static_cast<int>(blocks - 8 * b < 8 ? blocks - 8 * b : 8)),
        low_unit(zero_f()) {
    F32 v[8];
    FRESHET_UNROLL
    for (int g = 0; g < 8; ++g) {
      v[g] = g < count ? F::scale(main + g * kLayout.main, tail + g * kLayout.tail) : zero_f();
    }
    unit = whole_scales<F::kScaleBits>(v, whole);
    if constexpr (F::kAffine) {
      FRESHET_UNROLL
      for (int g = 0; g < 8; ++g) v[g] = g < count ? F::low(main + g * kLayout.main) : zero_f();
      low_unit = sub_f(zero_f(), whole_scales<kMinBits>(v, whole_low));
    }
  }
  FRESHET_INLINE_MEMBER int subs() const { return count; }
  FRESHET_INLINE_MEMBER auto sub(int j) const { return F::lines(main + j * kLayout.main); }
  FRESHET_INLINE_MEMBER I32 group_scale(int g) const { return whole[g]; }
  FRESHET_INLINE_MEMBER Scale scale(int g) const { return scale_of<F>(whole[g]); }
  FRESHET_INLINE_MEMBER I32 pair(int i) const {
    const int g = first_of_pair(i);
    if constexpr (F::kAffine) {
      return halves(whole_low[g], whole_low[g + 2]);
    } else {
      return halves(shl(whole[g], F::kShift), shl(whole[g + 2], F::kShift));
    }
  }
  FRESHET_INLINE_MEMBER F32 d() const { return unit; }
  // An affine format's offset is added; the 256-value formats subtract their minima.
  FRESHET_INLINE_MEMBER F32 dmin() const { return low_unit; }
  FRESHET_INLINE_MEMBER void ahead(int j) const { fetch_group_ahead(panel, main, tail, j); }
};

// Packed blocks of 256 values: real ones, or groups of eight blocks of 32.
template <class F>
struct Packed256 : Packed<F> {
  using Block = F;
  using View = std::conditional_t<kOf32<F>, PackedGroup<F>, PackedBlock<F>>;
  const int64_t blocks;  // in the format's own block size
  Packed256(const MatmulCall& c, int64_t panel)
      : Packed<F>(c, panel), blocks(blocks_of(c.cols, Packed<F>::kLayout.block)) {}
  FRESHET_INLINE_MEMBER View block(int64_t b) const { return View(*this, b, blocks); }
};

// An unpacked block: 64 lines, one scale per group, pairs of offsets, d (and dmin) as F32, and the
// initial values of sums.
template <class F>
struct Unpacked256 {
  using Block = F;
  static constexpr int kGroups = 256 / F::kGroup;
  static constexpr int kScaleLine = 64, kPairLine = kScaleLine + kGroups,
                       kDLine = kPairLine + kOffsetPairs<F>,
                       kFlippedLine = kDLine + (F::kAffine ? 2 : 1);
  static constexpr int64_t kBytes = (kFlippedLine + (kFlips<F> ? 1 : 0)) * kLine;
  struct View {
    using Block = F;
    static constexpr bool kUnrolled = false, kFlipped = kFlips<F>;
    const uint8_t* data;
    FRESHET_INLINE_MEMBER I32 flipped() const { return line_at(data, kFlippedLine); }
    static constexpr int subs() { return 8; }
    FRESHET_INLINE_MEMBER WholeLines sub(int j) const { return {data + j * 8 * kLine}; }
    FRESHET_INLINE_MEMBER Scale scale(int g) const { return line_at(data, kScaleLine + g); }
    FRESHET_INLINE_MEMBER I32 pair(int i) const { return line_at(data, kPairLine + i); }
    FRESHET_INLINE_MEMBER F32 d() const { return bits_f(line_at(data, kDLine)); }
    FRESHET_INLINE_MEMBER F32 dmin() const { return bits_f(line_at(data, kDLine + 1)); }
    FRESHET_INLINE_MEMBER void ahead(int) const {}
  };
  const uint8_t* data;
  FRESHET_INLINE_MEMBER View block(int64_t b) const { return {data + b * kBytes}; }

  static void unpack(const Packed256<F>& from, int64_t b0, int64_t b1, uint8_t* to) {
    for (int64_t b = b0; b < b1; ++b, to += kBytes) {
      const auto block = from.block(b);
      FRESHET_UNROLL
      for (int j = 0; j < 8; ++j) {
        block.ahead(j);
        const bool is = j < block.subs();
        const auto lines = block.sub(is ? j : 0);
        FRESHET_UNROLL
        for (int i = 0; i < 8; ++i) {
          store_i(to + (j * 8 + i) * kLine, is ? lines.line(i) : zero_i());
        }
      }
      FRESHET_UNROLL
      for (int g = 0; g < kGroups; ++g) store_i(to + (kScaleLine + g) * kLine, block.scale(g));
      FRESHET_UNROLL
      for (int i = 0; i < kOffsetPairs<F>; ++i) {
        store_i(to + (kPairLine + i) * kLine, block.pair(i));
      }
      store_i(to + kDLine * kLine, bits_i(block.d()));
      if constexpr (F::kAffine) store_i(to + (kDLine + 1) * kLine, bits_i(block.dmin()));
      if constexpr (kFlips<F>) {
        I32 sum = zero_i();
        for (int i = 0; i < 64; ++i) {
          sum = add_flipped(sum, line_at(to, kScaleLine + i * 4 / F::kGroup), line_at(to, i));
        }
        store_i(to + kFlippedLine * kLine, sum);
      }
    }
  }
};

// The initial values of a row's group sums, block by block.
template <class F, int kPlanes>
struct Starts {
  static constexpr int kGroups = kStarts<F> ? 256 / F::kGroup : 0;
  static constexpr int64_t kBlockBytes = kGroups * 4 * kPlanes;

  // Writes the initial values for blocks [b0, b1), and up to 32 bytes beyond.
  FRESHET_INLINE void write(const uint8_t* row, const Q8x256Layout& l, int64_t b0, int64_t b1,
                            uint8_t* to) {
    constexpr int64_t kSums =
        F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
    for (int64_t b = b0; b < b1; ++b) {
      for (int plane = 0; plane < kPlanes; ++plane, to += kGroups * 4) {
        const I32 sums = swap_middle(load_u16(row + l.records + (b * 2 + plane) * kLine + kSums));
        store_i(to, sub_i(zero_i(), sar(shl(sums, 16), 16 - F::kShift)));
      }
    }
  }
};

template <class View, int T>
FRESHET_INLINE void sub256(const View& w, int j, const int8_t* const (&row)[T],
                           const uint8_t* const (&starts)[T], I32 (&sum)[T]) {
  using F = typename View::Block;
  constexpr int kGroups = 32 / F::kGroup;
  const auto lines = w.sub(j);
  FRESHET_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int8_t* x[T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) x[t] = row[t] + j * 32 + g * F::kGroup;
    const Scale scale = w.scale(j * kGroups + g);
    if constexpr (kStarts<F>) {
      I32 start[T];
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) start[t] = set_i(i32_at(starts[t] + (j * kGroups + g) * 4));
      dot_group<F, T>(sum, scale, lines, g * F::kGroup / 4, x, start);
    } else if constexpr (View::kFlipped) {
      dot_flipped<T, F::kGroup / 4>(sum, scale, lines, g * F::kGroup / 4, x);
    } else {
      dot_scaled<T, F::kGroup / 4, F::kTop>(sum, scale, lines, g * F::kGroup / 4, x);
    }
  }
}

// starts: for blocks [b0, b1), one row after the other.
template <class Source, int T, int kPlanes>
FRESHET_INLINE void tile256(const Source& source, const Q8x256Layout& l,
                            const uint8_t* const (&row)[T], const uint8_t* starts, int64_t b0,
                            int64_t b1, F32 (&acc)[T]) {
  using F = typename Source::Block;
  constexpr int kRows = T * kPlanes;
  constexpr int64_t kStartBytes = Starts<F, kPlanes>::kBlockBytes;
  for (int64_t b = b0; b < b1; ++b) {
    const auto w = source.block(b - b0);
    I32 sum[kRows], offset[kRows];
    const int8_t* x[kRows];
    const uint8_t* record[kRows];
    const uint8_t* start[kRows];
    FRESHET_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* const from = row[r / kPlanes];
      const int plane = r % kPlanes;
      x[r] = reinterpret_cast<const int8_t*>(from) + plane * l.fine + b * 256;
      record[r] = from + l.records + (b * 2 + plane) * kLine;
      start[r] = starts + (r / kPlanes * (b1 - b0) + b - b0) * kStartBytes +
                 plane * (kStartBytes / kPlanes);
      offset[r] = zero_i();
      if constexpr (w.kFlipped) {
        sum[r] = w.flipped();
      } else {
        sum[r] = zero_i();
      }
    }
    if constexpr (w.kUnrolled) {
      FRESHET_UNROLL
      for (int j = 0; j < 8; ++j) {
        w.ahead(j);
        if (j < w.subs()) sub256(w, j, x, start, sum);
      }
    } else {
      for (int j = 0; j < 8; ++j) sub256(w, j, x, start, sum);
    }
    constexpr int64_t kSums =
        F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
    FRESHET_UNROLL
    for (int i = 0; i < kOffsetPairs<F>; ++i) {
      const I32 pair = w.pair(i);
      FRESHET_UNROLL
      for (int r = 0; r < kRows; ++r) {
        offset[r] = add_madd_i(offset[r], pair, set_i(i32_at(record[r] + kSums + 4 * i)));
      }
    }
    const F32 d = w.d();
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      const uint8_t* const last = record[t * kPlanes + kPlanes - 1];
      const F32 scale = mul_f(d, set_f(f32_at(last)));
      I32* const s = sum + t * kPlanes;
      const I32* const o = offset + t * kPlanes;
      if constexpr (F::kAffine) {
        acc[t] = fma_f(join_planes<kPlanes>(s), scale, acc[t]);
        const F32 down = mul_f(w.dmin(), set_f(f32_at(last + 4)));
        acc[t] = fma_f(join_planes<kPlanes>(o), down, acc[t]);
      } else {
        FRESHET_UNROLL
        for (int p = 0; p < kPlanes; ++p) {
          if (kOffsetPairs<F> > 0) s[p] = sub_i(s[p], o[p]);
        }
        acc[t] = fma_f(join_planes<kPlanes>(s), scale, acc[t]);
      }
    }
  }
}

// Weights that are plain values: blocks of 32 k. Products of even and of odd k are summed
// separately, and the two sums are then added to the accumulator, as AMX does with BF16 tiles.
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
// x holds both planes as F32, alternating per block of 32.
struct LinesBF16 {
  static constexpr Format kFormat = Format::kBF16;
  FRESHET_INLINE void pair(const uint8_t* p, int i, F32& even, F32& odd) {
    const I32 v = line_at(p, i);
    even = bits_f(shl(v, 16));
    odd = bits_f(and_i(v, set_i(static_cast<int32_t>(0xffff0000))));
  }
};

// x[t]: F32 values from the first block on; with two planes, 32 values of each per block.
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

// FP8: blocks of 128 or 32 k times F32 rows. The sum of a block is scaled. Loaded values are 256
// times too small.
template <Format kOf, int kSize>
struct LinesFp8Blocks {
  static constexpr Format kFormat = kOf;
  static constexpr int kBlock = kSize;
  FRESHET_INLINE F32 scale(const uint8_t* main, const uint8_t*) {
    return mul_f(bits_f(line_at(main, kSize / 4)), set_f(256));
  }
  FRESHET_INLINE F32 whole(F32 sum) { return sum; }
};
using LinesFP8 = LinesFp8Blocks<Format::kFP8, 128>;
using LinesFP8G32 = LinesFp8Blocks<Format::kFP8G32, 32>;
struct LinesMXFP8 {
  static constexpr Format kFormat = Format::kMXFP8;
  static constexpr int kBlock = 32;
  // 2^(e - 127), subnormal for e = 0. 256 times it may be too large for an F32.
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) {
    const I32 e = load_u8(tail);
    return bits_f(or_i(shl(e, 23), and_i(sar(sub_i(e, set_i(1)), 31), set_i(0x00400000))));
  }
  FRESHET_INLINE F32 whole(F32 sum) { return mul_f(sum, set_f(256)); }
};
template <class F, int T>
FRESHET_INLINE void tile_fp8(const Packed<F>& w, const uint8_t* const (&x)[T], int64_t b0,
                             int64_t b1, F32 (&acc)[T]) {
  constexpr int kPairBytes = 2 * kPanelRows;
  for (int64_t b = b0; b < b1; ++b) {
    const uint8_t* p = w.main(b);
    prefetch_lines<1>(p + F::kBlock / 4 * kLine + kAhead);
    F32 even[T], odd[T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) even[t] = odd[t] = zero_f();
    for (int i = 0; i < F::kBlock / 2; i += 4) {
      prefetch_lines<2>(p + i * kPairBytes + kAhead);
      FRESHET_UNROLL
      for (int j = i; j < i + 4; ++j) {
        F32 we, wo;
        load_e4m3(p + j * kPairBytes, we, wo);
        FRESHET_UNROLL
        for (int t = 0; t < T; ++t) {
          const uint8_t* const from = x[t] + b * (F::kBlock * 4) + 8 * j;
          even[t] = fma_f(we, set_f(f32_at(from)), even[t]);
          odd[t] = fma_f(wo, set_f(f32_at(from + 4)), odd[t]);
        }
      }
    }
    const F32 scale = F::scale(p, w.tail(b));
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      acc[t] = fma_f(F::whole(add_f(even[t], odd[t])), scale, acc[t]);
    }
  }
}

// Blocks of 64 k, each of one of 16 levels, times F32 rows. The sum of a block is scaled.
struct LinesNF4 {
  static constexpr Format kFormat = Format::kNF4;
  static constexpr const float (&kLevels)[16] = quant::kNf4Levels;
};
struct LinesFP4 {
  static constexpr Format kFormat = Format::kFP4;
  static constexpr const float (&kLevels)[16] = quant::kFp4Levels;
};
template <class F, int T>
FRESHET_INLINE void tile_levels(const Packed<F>& w, const uint8_t* const (&x)[T], int64_t b0,
                                int64_t b1, F32 (&acc)[T]) {
  for (int64_t b = b0; b < b1; ++b) {
    const uint8_t* p = w.main(b);
    prefetch_lines<1>(p + 8 * kLine + kAhead);
    F32 even[T], odd[T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) even[t] = odd[t] = zero_f();
    for (int i = 0; i < 8; ++i) {
      prefetch_lines<1>(p + i * kLine + kAhead);
      const I32 line = line_at(p, i);
      FRESHET_UNROLL
      for (int k = 0; k < 8; k += 2) {
        const F32 we = level_at(F::kLevels, shr(line, 4 * k));
        const F32 wo = level_at(F::kLevels, shr(line, 4 * k + 4));
        FRESHET_UNROLL
        for (int t = 0; t < T; ++t) {
          const uint8_t* const from = x[t] + (b * 64 + i * 8 + k) * 4;
          even[t] = fma_f(we, set_f(f32_at(from)), even[t]);
          odd[t] = fma_f(wo, set_f(f32_at(from + 4)), odd[t]);
        }
      }
    }
    const F32 scale = bits_f(line_at(p, 8));
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) acc[t] = fma_f(add_f(even[t], odd[t]), scale, acc[t]);
  }
}

// INT8: integer sums over the whole row, kept in the bits of acc. They are exact in any order, so
// few tokens use several independent accumulators.
struct LinesINT8 {
  static constexpr Format kFormat = Format::kINT8;
};
template <int T>
FRESHET_INLINE void tile_int8(const Packed<LinesINT8>& w, const uint8_t* const (&x)[T], int64_t b0,
                              int64_t b1, F32 (&acc)[T]) {
  constexpr int kChains = T > kInt8Tile / 2 ? 1 : kInt8Tile / T > 8 ? 8 : kInt8Tile / T;
  I32 sum[kChains][T];
  FRESHET_UNROLL
  for (int t = 0; t < T; ++t) {
    sum[0][t] = bits_i(acc[t]);
    FRESHET_UNROLL
    for (int i = 1; i < kChains; ++i) sum[i][t] = zero_i();
  }
  for (int64_t b = b0; b < b1; ++b) {
    const ByteLines lines{w.main(b)};
    FRESHET_UNROLL
    for (int i = 0; i < kLine / 4; ++i) {
      prefetch_lines<1>(lines.p + i * kLine + kAhead);
      const I32 line = lines.line(i);
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) {
        const auto* const quad = reinterpret_cast<const int8_t*>(x[t]) + b * kLine + 4 * i;
        sum[i % kChains][t] = dot_quad(sum[i % kChains][t], line, quad);
      }
    }
  }
  FRESHET_UNROLL
  for (int t = 0; t < T; ++t) {
    FRESHET_UNROLL
    for (int i = 1; i < kChains; ++i) sum[0][t] = add_i(sum[0][t], sum[i][t]);
    acc[t] = bits_f(sum[0][t]);
  }
}
// Converts a row's sum to its value: sum times (scale of the weight's row times scale of the
// token's row).
FRESHET_INLINE F32 scaled_int8(I32 sum, F32 row_scale, float token_scale) {
  return mul_f(to_f(sum), mul_f(row_scale, set_f(token_scale)));
}
// kFlipped: each byte was 128 too high.
template <bool kFlipped>
FRESHET_INLINE F32 result_int8(const Packed<LinesINT8>& w, const uint8_t* record, F32 acc) {
  I32 sum = bits_i(acc);
  if constexpr (kFlipped) {
    sum = sub_i(sum, shl(set_i(i32_at(record + offsetof(Int8Record, sum))), 7));
  }
  return scaled_int8(sum, bits_f(load_i(w.tail_part)), f32_at(record));
}

}  // namespace
}  // namespace freshet::cpu

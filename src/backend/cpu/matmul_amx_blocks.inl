// Formats of blocks on tiles of signed bytes, with the bits of tile32() and tile256(): whole-number
// sums are exact in any order, and what follows them is the same.
//
// A step of K is a "unit": four tile products, of two operands of activations (two tiles of tokens,
// or the two planes of one) and two of weights. Their sums leave the tiles once a unit, and are
// scaled while the tiles are at the next one.
//   Formats of 32: a unit is two blocks, each an operand of half a tile's depth.
//   Formats of 256: a unit is a block. Scale times number is a whole number of 16 bits; its low and
//   high bytes are the operands, and the scales of groups are thus inside the tiles.
#pragma once

#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

inline constexpr int kTileInts = kTileRows * kPanelRows;

// What scale() needs of up to 32 tokens: the rows, and their scales (and sums) gathered for formats
// of 32, where they lie apart: [unit][block of two][token].
struct ScaleRows {
  static constexpr int kMost = 2 * kTileRows;
  const uint8_t* row[kMost];
  const float* d;
  const float* s;
};

// Sums of token t of a step: operand t / 16, or, where planes are the operands, plane p.
template <int kPlanes>
FRESHET_INLINE const int32_t* stored_sums(const int32_t* stored, int t, int p, int w) {
  const int x = kPlanes == 1 ? t / kTileRows : p;
  return stored + (x * 2 + w) * kTileInts + t % kTileRows * kPanelRows;
}

// An unsigned line that is 2^kShift too high, as signed bytes.
template <class F>
FRESHET_INLINE I32 signed_line(I32 line) {
  if constexpr (F::kShift == 0) return line;
  return _mm512_sub_epi8(line, _mm512_set1_epi8(static_cast<char>(1 << F::kShift)));
}

template <class F, int kPlanes>
struct TileUnits32 {
  static constexpr int kBlock = 32, kUnitBlocks = 2, kDepth = 32, kUnitX = 64;
  static constexpr bool kGathers = true;
  static constexpr int64_t kScales = 2 * 8 * kLine, kLows = kScales + 2 * kLine,
                           kBytes = kLows + (F::kAffine ? 2 * kLine : 0);
  static Q8x32Layout layout(const MatmulCall& c) { return q8x32_layout(c.cols); }

  // A block beyond the last counts as zeros.
  static void unpack(const MatmulCall& c, int64_t panel, int64_t b0, int64_t b1, uint8_t* to) {
    const Packed32<F> from(c, panel);
    for (int64_t b = b0; b < b1; b += 2, to += kBytes) {
      for (int h = 0; h < 2; ++h) {
        const bool is = b + h < b1;
        const auto lines = from.lines(is ? b + h : b);
        FRESHET_UNROLL
        for (int i = 0; i < 8; ++i) {
          store_i(to + (h * 8 + i) * kLine, is ? signed_line<F>(lines.line(i)) : zero_i());
        }
        F32 d = is ? from.scale(b + h) : zero_f();
        if constexpr (kPlanes == 2) d = mul_f(d, set_f(1.0f / kFineSteps));
        store_i(to + kScales + h * kLine, bits_i(d));
        if constexpr (F::kAffine) {
          store_i(to + kLows + h * kLine, is ? bits_i(from.low(b + h)) : zero_i());
        }
      }
    }
  }
  template <int kOperands>
  FRESHET_INLINE void multiply(const uint8_t* const (&x)[2], int64_t stride, const uint8_t* unit) {
    tile_zero<0>();
    tile_zero<1>();
    tile_load<6>(unit, kLine);
    tile_load<4>(x[0], stride);
    tile_dp_i8<0, 4, 6>();
    tile_load<7>(unit + 8 * kLine, kLine);
    tile_load<5>(x[0] + 32, stride);
    tile_dp_i8<1, 5, 7>();
    if constexpr (kOperands == 2) {
      tile_zero<2>();
      tile_zero<3>();
      tile_load<4>(x[1], stride);
      tile_dp_i8<2, 4, 6>();
      tile_load<5>(x[1] + 32, stride);
      tile_dp_i8<3, 5, 7>();
    }
  }
  // `u`: the unit's number in the stretch.
  FRESHET_INLINE void scale(const Q8x32Layout&, const ScaleRows& rows, int64_t, int64_t u,
                            int tokens, const uint8_t* unit, const int32_t* stored, float* sums) {
    F32 d[2], low[2];
    FRESHET_UNROLL
    for (int h = 0; h < 2; ++h) {
      d[h] = bits_f(load_i(unit + kScales + h * kLine));
      if constexpr (F::kAffine) low[h] = bits_f(load_i(unit + kLows + h * kLine));
    }
    for (int t = 0; t < tokens; ++t) {
      F32 acc = load_f(sums + t * kPanelRows);
      FRESHET_UNROLL
      for (int h = 0; h < 2; ++h) {
        I32 sum[kPlanes];
        for (int p = 0; p < kPlanes; ++p) sum[p] = load_i(stored_sums<kPlanes>(stored, t, p, h));
        const int64_t at = (u * 2 + h) * ScaleRows::kMost + t;
        acc = fma_f(join_planes<kPlanes>(sum), mul_f(d[h], set_f(rows.d[at])), acc);
        if constexpr (F::kAffine) acc = fma_f(low[h], set_f(rows.s[at]), acc);
      }
      store_f(sums + t * kPanelRows, acc);
    }
  }
};

template <class F, int kPlanes>
struct TileUnits256 {
  static constexpr int kBlock = 256, kUnitBlocks = 1, kDepth = 64, kUnitX = 256;
  static constexpr bool kGathers = false;
  // Q2_K: 15 * 3 at most.
  static constexpr int kBytePlanes = F::kFormat == Format::kQ2_K ? 1 : 2;
  static constexpr int kPairs = F::kAffine ? kOffsetPairs<F> : 0;
  static constexpr int64_t kPlane = 64 * kLine, kPairsAt = kBytePlanes * kPlane,
                           kDAt = kPairsAt + kPairs * kLine,
                           kBytes = kDAt + (F::kAffine ? 2 : 1) * kLine;
  static Q8x256Layout layout(const MatmulCall& c) { return q8x256_layout(c.cols); }

  // Four numbers of each row times the rows' scales (in both halves), as low and high bytes.
  FRESHET_INLINE void put_products(I32 line, I32 scale, uint8_t* to) {
    const I32 even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(line, 8), 8), scale);
    const I32 odd = _mm512_mullo_epi16(_mm512_srai_epi16(line, 8), scale);
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
    store_i(to, _mm512_mask_blend_epi8(kOdd, even, _mm512_slli_epi16(odd, 8)));
    if constexpr (kBytePlanes == 2) {  // of what the low byte, a signed one, leaves
      const I32 half = _mm512_set1_epi16(128);
      const I32 high_even = _mm512_srli_epi16(_mm512_add_epi16(even, half), 8);
      store_i(to + kPlane, _mm512_mask_blend_epi8(kOdd, high_even, _mm512_add_epi16(odd, half)));
    }
  }
  static void unpack(const MatmulCall& c, int64_t panel, int64_t b0, int64_t b1, uint8_t* to) {
    const Packed256<F> from(c, panel);
    for (int64_t b = b0; b < b1; ++b, to += kBytes) {
      FRESHET_UNROLL
      for (int j = 0; j < 8; ++j) {
        from.ahead(b, j);
        const auto lines = from.sub(b, j);
        FRESHET_UNROLL
        for (int i = 0; i < 8; ++i) {
          const I32 s = F::group_scale(from.main(b), (j * 32 + i * 4) / F::kGroup);
          const I32 both = or_i(and_i(s, set_i(0xffff)), shl(s, 16));
          put_products(signed_line<F>(lines.line(i)), both, to + (j * 8 + i) * kLine);
        }
      }
      FRESHET_UNROLL
      for (int i = 0; i < kPairs; ++i) store_i(to + kPairsAt + i * kLine, from.pair(b, i));
      store_i(to + kDAt, bits_i(from.d(b)));
      if constexpr (F::kAffine) store_i(to + kDAt + kLine, bits_i(from.dmin(b)));
    }
  }
  template <int kOperands>
  FRESHET_INLINE void multiply(const uint8_t* const (&x)[2], int64_t stride, const uint8_t* unit) {
    tile_zero<0>();
    if (kBytePlanes == 2) tile_zero<1>();
    if (kOperands == 2) tile_zero<2>();
    if (kOperands == 2 && kBytePlanes == 2) tile_zero<3>();
    FRESHET_UNROLL
    for (int k = 0; k < 4; ++k) {
      tile_load<6>(unit + k * 16 * kLine, kLine);
      tile_load<4>(x[0] + k * 64, stride);
      tile_dp_i8<0, 4, 6>();
      if (kBytePlanes == 2) {
        tile_load<7>(unit + kPlane + k * 16 * kLine, kLine);
        tile_dp_i8<1, 4, 7>();
      }
      if (kOperands == 2) {
        tile_load<5>(x[1] + k * 64, stride);
        tile_dp_i8<2, 5, 6>();
        if (kBytePlanes == 2) tile_dp_i8<3, 5, 7>();
      }
    }
  }
  // `b`: the block's number in the row.
  FRESHET_INLINE void scale(const Q8x256Layout& l, const ScaleRows& rows, int64_t b, int64_t,
                            int tokens, const uint8_t* unit, const int32_t* stored, float* sums) {
    constexpr int64_t kSums =
        F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
    const F32 d = bits_f(load_i(unit + kDAt));
    for (int t = 0; t < tokens; ++t) {
      const uint8_t* const record = rows.row[t] + l.records + b * 2 * kLine;
      const uint8_t* const last = record + (kPlanes - 1) * kLine;
      I32 sum[kPlanes];
      for (int p = 0; p < kPlanes; ++p) {
        sum[p] = load_i(stored_sums<kPlanes>(stored, t, p, 0));
        if constexpr (kBytePlanes == 2) {
          sum[p] = add_i(sum[p], shl(load_i(stored_sums<kPlanes>(stored, t, p, 1)), 8));
        }
      }
      F32 acc = load_f(sums + t * kPanelRows);
      acc = fma_f(join_planes<kPlanes>(sum), mul_f(d, set_f(f32_at(last))), acc);
      if constexpr (F::kAffine) {
        I32 offset[kPlanes];
        for (int p = 0; p < kPlanes; ++p) {
          offset[p] = zero_i();
          FRESHET_UNROLL
          for (int i = 0; i < kPairs; ++i) {
            const I32 x = set_i(i32_at(record + p * kLine + kSums + 4 * i));
            offset[p] = add_i(offset[p], madd_i(load_i(unit + kPairsAt + i * kLine), x));
          }
        }
        const F32 dmin = bits_f(load_i(unit + kDAt + kLine));
        acc = fma_f(join_planes<kPlanes>(offset), mul_f(dmin, set_f(f32_at(last + 4))), acc);
      }
      store_f(sums + t * kPanelRows, acc);
    }
  }
};

inline constexpr int kBlocksGroup = 8;  // panels that are unpacked at a time

template <class U>
struct BlocksScratch {
  // Of K. Two tiles of tokens and a panel stay in the L1 cache for formats of 32; for those of 256
  // a stretch is a few blocks, and the panel comes from the L2 cache once for the two tiles.
  static constexpr int kStretchK = U::kBlock == 256 ? 1024 : 512;
  static constexpr int64_t kUnits = kStretchK / U::kUnitX;
  alignas(64) uint8_t panels[kBlocksGroup * kUnits * U::kBytes];
  alignas(64) uint8_t rows[2][2 * kTileRows * kCopyStride<kStretchK>];
  alignas(64) float d[U::kGathers ? kUnits * 2 * ScaleRows::kMost : 1];
  alignas(64) float s[U::kGathers ? kUnits * 2 * ScaleRows::kMost : 1];
  alignas(64) int32_t stored[4 * kTileInts];
  alignas(64) float sums[kBlocksGroup * kTokenStretch * kPanelRows];
};

template <class U, int kPlanes>
struct BlocksStep {
  const MatmulCall& c;
  BlocksScratch<U>& s;
  const Stretch& at;
  int64_t t0;
  int tokens;
  int operands;
  const uint8_t* x[2];
  int64_t stride;
  ScaleRows rows;

  void open(Tiles& tiles) {
    const auto l = U::layout(c);
    const int64_t begin = at.b0 * U::kBlock;
    const int64_t bytes = (at.b1 - at.b0 + U::kUnitBlocks - 1) / U::kUnitBlocks * U::kUnitX;
    operands = kPlanes == 1 && tokens <= kTileRows ? 1 : 2;
    const int height = operands == 2 && kPlanes == 1 ? kTileRows : tile_height(tokens);
    tiles.configure(height, U::kDepth);
    if (kPlanes == 2 || operands == 1) {
      const TileRows r = tile_rows_at<kPlanes, BlocksScratch<U>::kStretchK>(
          c, l.fine, t0, tokens, begin, bytes, s.rows[0]);
      x[0] = r.plane[0];
      x[1] = r.plane[1];
      stride = r.stride;
    } else if (tokens == 2 * kTileRows && c.rows_index == nullptr) {
      x[0] = act_row(c, t0) + begin;
      x[1] = act_row(c, t0 + kTileRows) + begin;
      stride = c.act_row_bytes;
    } else {
      copy_two(begin, bytes);
    }
    for (int t = 0; t < tokens; ++t) rows.row[t] = act_row(c, t0 + t);
    if constexpr (U::kGathers) gather(l);
  }
  // Two tiles' rows, the last token's repeated.
  void copy_two(int64_t begin, int64_t bytes) {
    stride = kCopyStride<BlocksScratch<U>::kStretchK>;
    for (int i = 0; i < 2 * kTileRows; ++i) {
      const uint8_t* const from = act_row(c, t0 + (i < tokens ? i : tokens - 1)) + begin;
      uint8_t* const to = s.rows[i / kTileRows] + i % kTileRows * stride;
      for (int64_t k = 0; k < bytes; k += kLine) store_i(to + k, load_i(from + k));
    }
    x[0] = s.rows[0];
    x[1] = s.rows[1];
  }
  // Scales and sums of the stretch's blocks, zero beyond the last.
  template <class Layout>
  void gather(const Layout& l) {
    const int64_t sums_at = kPlanes == 2 ? l.s_fine : l.s;
    const int64_t blocks = at.b1 - at.b0;
    for (int64_t b = 0; b < blocks + blocks % 2; ++b) {
      float *const d = s.d + b * ScaleRows::kMost, *const sum = s.s + b * ScaleRows::kMost;
      for (int t = 0; t < tokens; ++t) {
        const uint8_t* const row = rows.row[t] + (at.b0 + b) * 4;
        d[t] = b < blocks ? f32_at(row + l.d) : 0.0f;
        sum[t] = b < blocks ? f32_at(row + sums_at) : 0.0f;
      }
    }
    rows.d = s.d;
    rows.s = s.s;
  }

  template <int kOperands>
  void run(const uint8_t* panel, float* sums) const {
    const auto l = U::layout(c);
    const int64_t units = (at.b1 - at.b0 + U::kUnitBlocks - 1) / U::kUnitBlocks;
    const auto scale = [&](int64_t u) {
      U::scale(l, rows, at.b0 + u * U::kUnitBlocks, u, tokens, panel + u * U::kBytes, s.stored,
               sums);
    };
    for (int64_t u = 0; u < units; ++u) {
      const uint8_t* const from[2] = {x[0] + u * U::kUnitX, x[1] + u * U::kUnitX};
      U::template multiply<kOperands>(from, stride, panel + u * U::kBytes);
      if (u > 0) scale(u - 1);
      tile_store<0>(s.stored);
      tile_store<1>(s.stored + kTileInts);
      if constexpr (kOperands == 2) {
        tile_store<2>(s.stored + 2 * kTileInts);
        tile_store<3>(s.stored + 3 * kTileInts);
      }
    }
    scale(units - 1);
  }
  void panel(int64_t p) const {
    float* const sums = s.sums + ((p - at.first) * kTokenStretch + (t0 - at.t0)) * kPanelRows;
    if (at.b0 == 0) {
      for (int t = 0; t < tokens; ++t) store_f(sums + t * kPanelRows, zero_f());
    }
    const uint8_t* const from = s.panels + (p - at.first) * BlocksScratch<U>::kUnits * U::kBytes;
    if (operands == 2) {
      run<2>(from, sums);
    } else {
      run<1>(from, sums);
    }
    if (at.b1 != at.blocks) return;
    for (int t = 0; t < tokens; ++t) finish(c, p, t0 + t, load_f(sums + t * kPanelRows));
  }
};

template <class U, int kPlanes>
void blocks_stretch(const MatmulCall& c, BlocksScratch<U>& s, Tiles& tiles, const Stretch& at) {
  constexpr int64_t kTokens = kPlanes == 1 ? 2 * kTileRows : kTileRows;
  for (int64_t p = at.first; p < at.last; ++p) {
    U::unpack(c, p, at.b0, at.b1, s.panels + (p - at.first) * BlocksScratch<U>::kUnits * U::kBytes);
  }
  for (int64_t t = at.t0; t < at.t1; t += kTokens) {
    const int64_t tokens = at.t1 - t < kTokens ? at.t1 - t : kTokens;
    BlocksStep<U, kPlanes> step{c, s, at, t, static_cast<int>(tokens), 0, {}, 0, {}};
    step.open(tiles);
    for (int64_t p = at.first; p < at.last; ++p) step.panel(p);
  }
}

template <class U, int kPlanes>
void blocks_many(const MatmulCall& c, int64_t first, int64_t last) {
  BlocksScratch<U> s;
  Tiles tiles;
  Stretch at{};
  at.blocks = blocks_of(c.cols, U::kBlock);
  constexpr int64_t kStep = BlocksScratch<U>::kStretchK / U::kBlock;
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += kTokenStretch) {
    at.t1 = at.t0 + kTokenStretch < c.tokens ? at.t0 + kTokenStretch : c.tokens;
    for (at.first = first; at.first < last; at.first += kBlocksGroup) {
      at.last = at.first + kBlocksGroup < last ? at.first + kBlocksGroup : last;
      for (at.b0 = 0; at.b0 < at.blocks; at.b0 += kStep) {
        at.b1 = at.b0 + kStep < at.blocks ? at.b0 + kStep : at.blocks;
        blocks_stretch<U, kPlanes>(c, s, tiles, at);
      }
    }
  }
}

// Up to so many tokens unpacking for tiles costs more than they save.
template <class F>
inline constexpr int64_t kFewTokens = panel_layout(F::kFormat).block == 256 ? 16 : 8;

template <template <class, int> class Units, class F>
void run_blocks(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= kFewTokens<F>) {
    kAvx512VnniKernels.run[static_cast<int>(F::kFormat)](c, first, last);
  } else if (uses_fine_plane(c.rows, c.cols)) {
    blocks_many<Units<F, 2>, 2>(c, first, last);
  } else {
    blocks_many<Units<F, 1>, 1>(c, first, last);
  }
}

// From Format::kQ4_0 on.
#define FRESHET_TILE_BLOCKS                                                        \
  run_blocks<TileUnits32, BlockQ4_0>, run_blocks<TileUnits32, BlockQ4_1>,          \
      run_blocks<TileUnits32, BlockQ5_0>, run_blocks<TileUnits32, BlockQ5_1>,      \
      run_blocks<TileUnits32, BlockQ8_0>, run_blocks<TileUnits256, BlockQ2_K>,     \
      run_blocks<TileUnits256, BlockQ3_K>, run_blocks<TileUnits256, BlockQ4_K>,    \
      run_blocks<TileUnits256, BlockQ5_K>, run_blocks<TileUnits256, BlockQ6_K>,    \
      run_blocks<TileUnits32, BlockIQ4_NL>, run_blocks<TileUnits256, BlockIQ4_XS>, \
      run_blocks<TileUnits32, BlockMXFP4>

}  // namespace
}  // namespace freshet::cpu

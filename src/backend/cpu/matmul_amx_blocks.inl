// Formats of blocks on tiles of bytes, with the bits of tile256(): whole-number sums are exact in
// any order, and what follows them is the same.
//
// A block of 256 is a "unit": scale times number is a whole number of 16 bits, whose low (unsigned)
// and high (signed) bytes are two operands, so that the scales of groups are inside the tiles. Two
// operands of activations (two tiles of tokens, or the two planes of one) times these two are four
// tiles of sums, which leave the tiles once a unit.
//
// While tiles multiply, one F32 operation a cycle is left, and two of whole numbers: the sums of
// one unit are scaled between the products of the next.
#pragma once

#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

inline constexpr int kTileInts = kTileRows * kPanelRows;
inline constexpr int kMostRows = 2 * kTileRows;  // of sums in the tiles
inline constexpr int64_t kUnitK = 256;

// An unsigned line that is 2^kShift too high, as signed bytes.
template <class F>
FRESHET_INLINE I32 signed_line(I32 line) {
  if constexpr (F::kShift == 0) return line;
  return _mm512_sub_epi8(line, _mm512_set1_epi8(static_cast<char>(1 << F::kShift)));
}

// A block of weights unpacked for the tiles.
template <class F>
struct Unit {
  // Q2_K: 15 * 3 at most.
  static constexpr int kBytePlanes = F::kFormat == Format::kQ2_K ? 1 : 2;
  static constexpr int kPairs = F::kAffine ? kOffsetPairs<F> : 0;
  static constexpr int64_t kPlane = 64 * kLine, kPairsAt = kBytePlanes * kPlane,
                           kDAt = kPairsAt + kPairs * kLine,
                           kBytes = kDAt + (F::kAffine ? 2 : 1) * kLine;

  // Four numbers of each row times the rows' scales (in both halves), as low and high bytes.
  FRESHET_INLINE void put_products(I32 line, I32 scale, uint8_t* to) {
    const I32 even = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(line, 8), 8), scale);
    const I32 odd = _mm512_mullo_epi16(_mm512_srai_epi16(line, 8), scale);
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
    store_i(to, _mm512_mask_blend_epi8(kOdd, even, _mm512_slli_epi16(odd, 8)));
    if constexpr (kBytePlanes == 2) {
      store_i(to + kPlane, _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(even, 8), odd));
    }
  }
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
          const I32 s = block.group_scale((j * 32 + i * 4) / F::kGroup);
          put_products(is ? signed_line<F>(lines.line(i)) : zero_i(), halves(s, s),
                       to + (j * 8 + i) * kLine);
        }
      }
      FRESHET_UNROLL
      for (int i = 0; i < kPairs; ++i) store_i(to + kPairsAt + i * kLine, block.pair(i));
      store_i(to + kDAt, bits_i(block.d()));
      if constexpr (F::kAffine) store_i(to + kDAt + kLine, bits_i(block.dmin()));
    }
  }

  // A quarter of the unit's products; x: operands of activations, at the unit's first number.
  template <int kOperands, int k>
  FRESHET_INLINE void multiply(const uint8_t* const (&x)[2], int64_t stride, const uint8_t* unit) {
    tile_load<6>(unit + k * 16 * kLine, kLine);
    tile_load<4>(x[0] + k * 64, stride);
    tile_dp_u8<0, 4, 6>();
    if constexpr (kOperands == 2) {
      tile_load<5>(x[1] + k * 64, stride);
      tile_dp_u8<2, 5, 6>();
    }
    if constexpr (kBytePlanes == 2) {
      tile_load<7>(unit + kPlane + k * 16 * kLine, kLine);
      tile_dp_i8<1, 4, 7>();
      if constexpr (kOperands == 2) tile_dp_i8<3, 5, 7>();
    }
  }
  template <int kOperands>
  FRESHET_INLINE void clear() {
    tile_zero<0>();
    if constexpr (kBytePlanes == 2) tile_zero<1>();
    if constexpr (kOperands == 2) tile_zero<2>();
    if constexpr (kOperands == 2 && kBytePlanes == 2) tile_zero<3>();
  }
  template <int kOperands>
  FRESHET_INLINE void store(int32_t* to) {
    tile_store<0>(to);
    if constexpr (kBytePlanes == 2) tile_store<1>(to + kTileInts);
    if constexpr (kOperands == 2) tile_store<2>(to + 2 * kTileInts);
    if constexpr (kOperands == 2 && kBytePlanes == 2) tile_store<3>(to + 3 * kTileInts);
  }

  // The whole-number sum of row r of operand x.
  FRESHET_INLINE I32 sum_at(const int32_t* stored, int x, int r) {
    const int32_t* const low = stored + x * 2 * kTileInts + r * kPanelRows;
    if constexpr (kBytePlanes == 1) return load_i(low);
    return add_i(load_i(low), shl(load_i(low + kTileInts), 8));
  }
  // Adds tokens [t0, t1) of a step to `sums`; record[t]: what goes with block b of their rows.
  template <int kPlanes>
  FRESHET_INLINE void scale(const uint8_t* const* records, int64_t b, int t0, int t1,
                            const uint8_t* unit, const int32_t* stored, float* sums) {
    constexpr int64_t kSums =
        F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
    const F32 d = bits_f(load_i(unit + kDAt));
    I32 pair[kPairs > 0 ? kPairs : 1];
    F32 dmin = zero_f();
    if constexpr (F::kAffine) {
      FRESHET_UNROLL
      for (int i = 0; i < kPairs; ++i) pair[i] = load_i(unit + kPairsAt + i * kLine);
      dmin = bits_f(load_i(unit + kDAt + kLine));
    }
    for (int t = t0; t < t1; ++t) {
      const uint8_t* const record = records[t] + b * 2 * kLine;
      const uint8_t* const last = record + (kPlanes - 1) * kLine;
      I32 sum[kPlanes];
      if constexpr (kPlanes == 2) {  // tokens are rows of both operands
        for (int p = 0; p < kPlanes; ++p) sum[p] = sum_at(stored, p, t);
      } else {
        sum[0] = sum_at(stored, t / kTileRows, t % kTileRows);
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
            offset[p] = add_madd_i(offset[p], pair[i], x);
          }
        }
        acc = fma_f(join_planes<kPlanes>(offset), mul_f(dmin, set_f(f32_at(last + 4))), acc);
      }
      store_f(sums + t * kPanelRows, acc);
    }
  }
};

// Of K, panels and tokens that work goes on with before the next: unpacked panels stay in the L2
// cache, and activations, of half the K, in the L1 cache. Few tokens use a unit once or twice: it
// is unpacked to the L1 cache.
inline constexpr int kStretchUnits = 2;
inline constexpr int kBlocksGroup = 16;
inline constexpr int64_t kBlocksTokens = 256;
inline constexpr int64_t kOnceTokens = 2 * kMostRows;
inline constexpr int64_t kStretchBytes = kStretchUnits * kUnitK;

template <class F>
struct BlocksScratch {
  alignas(64) uint8_t panels[kBlocksGroup * kStretchUnits * Unit<F>::kBytes];
  alignas(64) uint8_t rows[2][kMostRows * kCopyStride<kStretchBytes>];
  alignas(64) int32_t stored[2][4 * kTileInts];
  alignas(64) float sums[kBlocksGroup * kBlocksTokens * kPanelRows];
};

// The tokens of up to two tiles (one, if both planes count) and what a group of panels makes of
// them.
template <class F, int kPlanes>
struct BlocksStep {
  const MatmulCall& c;
  BlocksScratch<F>& s;
  const Stretch& at;
  int64_t t0;
  int tokens;
  int operands;
  const uint8_t* x[2];
  int64_t stride;
  const uint8_t* records[kMostRows];

  void open(Tiles& tiles) {
    const Q8x256Layout l = q8x256_layout(c.cols);
    const int64_t begin = at.b0 * kUnitK, bytes = (at.b1 - at.b0) * kUnitK;
    operands = kPlanes == 1 && tokens <= kTileRows ? 1 : 2;
    const int height = operands == 2 && kPlanes == 1 ? kTileRows : tile_height(tokens);
    tiles.configure(height, kLine);
    if (kPlanes == 2 || operands == 1) {
      const TileRows r =
          tile_rows_at<kPlanes, kStretchBytes>(c, l.fine, t0, tokens, begin, bytes, s.rows[0]);
      x[0] = r.plane[0];
      x[1] = r.plane[1];
      stride = r.stride;
    } else if (tokens == kMostRows && c.rows_index == nullptr) {
      x[0] = act_row(c, t0) + begin;
      x[1] = act_row(c, t0 + kTileRows) + begin;
      stride = c.act_row_bytes;
    } else {
      copy_two(begin, bytes);
    }
    for (int t = 0; t < tokens; ++t) records[t] = act_row(c, t0 + t) + l.records;
  }
  // Two tiles' rows, the last token's repeated.
  void copy_two(int64_t begin, int64_t bytes) {
    stride = kCopyStride<kStretchBytes>;
    for (int i = 0; i < kMostRows; ++i) {
      const uint8_t* const from = act_row(c, t0 + (i < tokens ? i : tokens - 1)) + begin;
      uint8_t* const to = s.rows[i / kTileRows] + i % kTileRows * stride;
      for (int64_t k = 0; k < bytes; k += kLine) store_i(to + k, load_i(from + k));
    }
    x[0] = s.rows[0];
    x[1] = s.rows[1];
  }

  // The products of unit u; between them, a part of the unit before it is scaled.
  template <int kOperands, int k>
  FRESHET_INLINE_MEMBER void quarter(const uint8_t* panel, int64_t u, float* sums) const {
    using U = Unit<F>;
    const uint8_t* const from[2] = {x[0] + u * kUnitK, x[1] + u * kUnitK};
    U::template multiply<kOperands, k>(from, stride, panel + u * U::kBytes);
    if (u == 0) return;
    const int t1 = tokens * (k + 1) / 4;
    U::template scale<kPlanes>(records, at.b0 + u - 1, tokens * k / 4, t1,
                               panel + (u - 1) * U::kBytes, s.stored[(u - 1) & 1], sums);
  }
  template <int kOperands>
  void run(const uint8_t* panel, float* sums) const {
    using U = Unit<F>;
    const int64_t units = at.b1 - at.b0;
    for (int64_t u = 0; u < units; ++u) {
      U::template clear<kOperands>();
      quarter<kOperands, 0>(panel, u, sums);
      quarter<kOperands, 1>(panel, u, sums);
      quarter<kOperands, 2>(panel, u, sums);
      quarter<kOperands, 3>(panel, u, sums);
      U::template store<kOperands>(s.stored[u & 1]);
    }
    U::template scale<kPlanes>(records, at.b1 - 1, 0, tokens, panel + (units - 1) * U::kBytes,
                               s.stored[(units - 1) & 1], sums);
  }
  void panel(int64_t p) const {
    float* const sums = s.sums + ((p - at.first) * kBlocksTokens + (t0 - at.t0)) * kPanelRows;
    if (at.b0 == 0) {
      for (int t = 0; t < tokens; ++t) store_f(sums + t * kPanelRows, zero_f());
    }
    const uint8_t* const from = s.panels + (p - at.first) * kStretchUnits * Unit<F>::kBytes;
    if (operands == 2) {
      run<2>(from, sums);
    } else {
      run<1>(from, sums);
    }
    if (at.b1 != at.blocks) return;
    for (int t = 0; t < tokens; ++t) finish(c, p, t0 + t, load_f(sums + t * kPanelRows));
  }
};

template <class F, int kPlanes>
void blocks_stretch(const MatmulCall& c, BlocksScratch<F>& s, Tiles& tiles, const Stretch& at) {
  constexpr int64_t kTokens = kPlanes == 1 ? kMostRows : kTileRows;
  for (int64_t p = at.first; p < at.last; ++p) {
    Unit<F>::unpack(Packed256<F>(c, p), at.b0, at.b1,
                    s.panels + (p - at.first) * kStretchUnits * Unit<F>::kBytes);
  }
  for (int64_t t = at.t0; t < at.t1; t += kTokens) {
    const int64_t tokens = at.t1 - t < kTokens ? at.t1 - t : kTokens;
    BlocksStep<F, kPlanes> step{c, s, at, t, static_cast<int>(tokens), 0, {}, 0, {}};
    step.open(tiles);
    for (int64_t p = at.first; p < at.last; ++p) step.panel(p);
  }
}

template <class F, int kPlanes>
void blocks_many(const MatmulCall& c, int64_t first, int64_t last) {
  BlocksScratch<F> s;
  Tiles tiles;
  Stretch at{};
  at.blocks = blocks_of(c.cols, kUnitK);
  const bool once = c.tokens <= kOnceTokens;
  const int64_t group = once ? 1 : kBlocksGroup, units = once ? 1 : kStretchUnits;
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += kBlocksTokens) {
    at.t1 = at.t0 + kBlocksTokens < c.tokens ? at.t0 + kBlocksTokens : c.tokens;
    for (at.first = first; at.first < last; at.first += group) {
      at.last = at.first + group < last ? at.first + group : last;
      for (at.b0 = 0; at.b0 < at.blocks; at.b0 += units) {
        at.b1 = at.b0 + units < at.blocks ? at.b0 + units : at.blocks;
        blocks_stretch<F, kPlanes>(c, s, tiles, at);
      }
    }
  }
}

// Up to so many tokens unpacking for tiles costs more than they save.
inline constexpr int64_t kFewTokens = 16;

template <class F>
void run_blocks(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= kFewTokens) {
    kAvx512VnniKernels.run[static_cast<int>(F::kFormat)](c, first, last);
  } else if (uses_fine_plane(c.rows, c.cols)) {
    blocks_many<F, 2>(c, first, last);
  } else {
    blocks_many<F, 1>(c, first, last);
  }
}

// From Format::kQ4_0 on.
#define FRESHET_TILE_BLOCKS                                                                       \
  run_blocks<BlockQ4_0>, run_blocks<BlockQ4_1>, run_blocks<BlockQ5_0>, run_blocks<BlockQ5_1>,     \
      run_blocks<BlockQ8_0>, run_blocks<BlockQ2_K>, run_blocks<BlockQ3_K>, run_blocks<BlockQ4_K>, \
      run_blocks<BlockQ5_K>, run_blocks<BlockQ6_K>, run_blocks<BlockIQ4_NL>,                      \
      run_blocks<BlockIQ4_XS>, run_blocks<BlockMXFP4>

}  // namespace
}  // namespace freshet::cpu

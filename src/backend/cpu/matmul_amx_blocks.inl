// Formats of blocks: a tile multiplication a group of 16 or 32 k, its sums scaled in F32.
#pragma once

#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

// A block of 32 unpacked: the rows of its tile in BF16, the groups' scales, then their offsets.
template <class F>
struct TileBlock {
  using V = Values<F>;
  static constexpr int kHalves = V::kHalves;
  static constexpr int64_t kScales = 1024, kLows = kScales + kHalves * kLine,
                           kBytes = kLows + (F::kAffine ? kHalves * kLine : 0);

  FRESHET_INLINE void unpack(const Packed<F>& w, int64_t stored, int part, uint8_t* to) {
    const auto lines = V::lines(w, stored, part);
    FRESHET_UNROLL
    for (int p = 0; p < 8; ++p) {
      I32 even, odd;
      quad_words<F>(lines, p, even, odd);
      store_i(to + p * 2 * kLine, even);
      store_i(to + (p * 2 + 1) * kLine, odd);
    }
    FRESHET_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      store_i(to + kScales + h * kLine, bits_i(V::scale(w, stored, part, h)));
      if constexpr (F::kAffine) {
        store_i(to + kLows + h * kLine, bits_i(V::low(w, stored, part, h)));
      }
    }
  }
  // Blocks [b0, b1) of 32.
  static void unpack(const Packed<F>& w, int64_t b0, int64_t b1, uint8_t* to) {
    constexpr int kAheadLines = (panel_layout(F::kFormat).main / kLine + V::kParts - 1) / V::kParts;
    for (int64_t b = b0; b < b1; b += V::kParts) {
      FRESHET_UNROLL
      for (int part = 0; part < V::kParts; ++part, to += kBytes) {
        prefetch_lines<kAheadLines>(w.main(b / V::kParts) + part * kAheadLines * kLine + kAhead);
        unpack(w, b / V::kParts, part, to);
      }
    }
  }
};

inline constexpr int kBlocksStretch = 1024;  // of K, unpacked at a time
inline constexpr int kBlocksGroup = 8;       // panels

template <class F, int kPlanes>
struct BlocksScratch {
  static constexpr int64_t kPanelBytes = kBlocksStretch / 32 * TileBlock<F>::kBytes;
  alignas(64) uint8_t panels[kBlocksGroup * kPanelBytes];
  alignas(64) uint8_t rows[kPlanes * kTileRows * kCopyStride<kBlocksStretch>];
  // Of 16 tokens, sums of x a group.
  alignas(64) float sums_x[F::kAffine ? kBlocksStretch / 16 * kTileRows : 1];
  alignas(64) float stored[4 * kTileRows * kPanelRows];
  alignas(64) float sums[kBlocksGroup * kTokenStretch * kPanelRows];
};

// One tile of tokens times one panel. Multiplication number i fills tile i % 4; it is stored one
// step, and scaled two steps, after it was issued, so that none of these waits for another.
template <class F, int kPlanes, int kHeight>
struct BlocksTile {
  using B = TileBlock<F>;
  static constexpr int kHalves = B::kHalves;
  const TileRows rows;
  const uint8_t* panel;
  const float* sums_x;
  float* stored;

  template <int kTile>
  FRESHET_INLINE_MEMBER void multiply(int64_t i) const {
    const int64_t b = i / kHalves, h = i % kHalves;
    const uint8_t* const w = panel + b * B::kBytes + h * (1024 / kHalves);
    const int64_t at = i * (64 / kHalves);
    constexpr int kX = 4 + kTile % 2, kW = 6 + kTile % 2;
    tile_zero<kTile>();
    tile_load<kX>(rows.plane[0] + at, rows.stride);
    tile_load<kW>(w, kLine);
    tile_dp<kTile, kX, kW>();
    if constexpr (kPlanes == 2) {
      tile_load<kX>(rows.plane[1] + at, rows.stride);
      tile_dp<kTile, kX, kW>();
    }
  }
  template <int kTile>
  FRESHET_INLINE_MEMBER void store() const {
    tile_store<kTile>(stored + kTile * kTileRows * kPanelRows);
  }
  template <int kTile>
  FRESHET_INLINE_MEMBER void scale(int64_t i, F32 (&acc)[kHeight]) const {
    const uint8_t* const block = panel + i / kHalves * B::kBytes;
    const F32 s = bits_f(load_i(block + B::kScales + i % kHalves * kLine));
    const float* const from = stored + kTile * kTileRows * kPanelRows;
    FRESHET_UNROLL
    for (int t = 0; t < kHeight; ++t) acc[t] = fma_f(load_f(from + t * kPanelRows), s, acc[t]);
    if constexpr (F::kAffine) {
      const F32 low = bits_f(load_i(block + B::kLows + i % kHalves * kLine));
      FRESHET_UNROLL
      for (int t = 0; t < kHeight; ++t) {
        acc[t] = fma_f(low, set_f(sums_x[i * kTileRows + t]), acc[t]);
      }
    }
  }

  template <int kStep, bool kLast>
  FRESHET_INLINE_MEMBER void step(int64_t i, int64_t n, F32 (&acc)[kHeight]) const {
    if (!kLast || i + kStep + 3 < n) multiply<(kStep + 3) % 4>(i + kStep + 3);
    if (!kLast || i + kStep < n) scale<kStep>(i + kStep, acc);
    if (!kLast || i + kStep + 1 < n) store<(kStep + 1) % 4>();
  }
  template <bool kLast>
  FRESHET_INLINE_MEMBER void steps(int64_t i, int64_t n, F32 (&acc)[kHeight]) const {
    step<0, kLast>(i, n, acc);
    step<1, kLast>(i, n, acc);
    step<2, kLast>(i, n, acc);
    step<3, kLast>(i, n, acc);
  }
  void run(int64_t blocks, F32 (&sums)[kHeight]) const {
    const BlocksTile tile = *this;  // in registers, as `acc`: tile instructions clobber memory
    const int64_t n = blocks * kHalves;
    F32 acc[kHeight];
    FRESHET_UNROLL
    for (int t = 0; t < kHeight; ++t) acc[t] = sums[t];
    tile.template multiply<0>(0);
    if (n > 1) tile.template multiply<1>(1);
    if (n > 2) tile.template multiply<2>(2);
    tile.template store<0>();
    int64_t i = 0;
    for (; i + 6 < n; i += 4) tile.template steps<false>(i, n, acc);
    for (; i < n; i += 4) tile.template steps<true>(i, n, acc);
    FRESHET_UNROLL
    for (int t = 0; t < kHeight; ++t) sums[t] = acc[t];
  }
};

template <class F, int kPlanes, int kHeight>
void blocks_tile(const MatmulCall& c, BlocksScratch<F, kPlanes>& s, const Stretch& at,
                 const TileRows& rows, int64_t t0, int64_t count) {
  for (int64_t p = at.first; p < at.last; ++p) {
    float* const sums = s.sums + ((p - at.first) * kTokenStretch + (t0 - at.t0)) * kPanelRows;
    const uint8_t* const panel = s.panels + (p - at.first) * BlocksScratch<F, kPlanes>::kPanelBytes;
    F32 acc[kHeight];
    FRESHET_UNROLL
    for (int t = 0; t < kHeight; ++t) {
      acc[t] = at.b0 > 0 && t < count ? load_f(sums + t * kPanelRows) : zero_f();
    }
    BlocksTile<F, kPlanes, kHeight>{rows, panel, s.sums_x, s.stored}.run(at.b1 - at.b0, acc);
    FRESHET_UNROLL
    for (int t = 0; t < kHeight; ++t) {
      if (t < count) {
        if (at.b1 == at.blocks) {
          finish(c, p, t0 + t, acc[t]);
        } else {
          store_f(sums + t * kPanelRows, acc[t]);
        }
      }
    }
  }
}

template <class F, int kPlanes>
void blocks_stretch(const MatmulCall& c, BlocksScratch<F, kPlanes>& s, Tiles& tiles,
                    const Stretch& at) {
  constexpr int kHalves = Values<F>::kHalves;
  const Bf16Layout l = bf16_layout(c.cols);
  for (int64_t p = at.first; p < at.last; ++p) {
    TileBlock<F>::unpack(Packed<F>(c, p), at.b0, at.b1,
                         s.panels + (p - at.first) * BlocksScratch<F, kPlanes>::kPanelBytes);
  }
  for (int64_t t = at.t0; t < at.t1; t += kTileRows) {
    const int64_t count = at.t1 - t < kTileRows ? at.t1 - t : kTileRows;
    const int height = tile_height(count);
    tiles.configure(height, 32 / kHalves);
    const TileRows rows =
        tile_rows_at<kPlanes, kBlocksStretch>(c, l.fine, t, count, at.b0, at.b1, s.rows);
    if constexpr (F::kAffine) {
      for (int i = 0; i < height; ++i) {
        const uint8_t* const from = act_row(c, t + (i < count ? i : count - 1)) +
                                    (kPlanes == 2 ? l.sum16_fine : l.sum16) + at.b0 * 8;
        for (int64_t g = 0; g < (at.b1 - at.b0) * kHalves; ++g) {
          s.sums_x[g * kTileRows + i] = group_sum(from, g / kHalves, kHalves, g % kHalves);
        }
      }
    }
    if (height == 16) {
      blocks_tile<F, kPlanes, 16>(c, s, at, rows, t, count);
    } else if (height == 8) {
      blocks_tile<F, kPlanes, 8>(c, s, at, rows, t, count);
    } else {
      blocks_tile<F, kPlanes, 4>(c, s, at, rows, t, count);
    }
  }
}

template <class F, int kPlanes>
void blocks_many(const MatmulCall& c, int64_t first, int64_t last) {
  BlocksScratch<F, kPlanes> s;
  Tiles tiles;
  Stretch at{};
  at.blocks = blocks_of(c.cols, 32);
  const bool few = c.tokens <= kTileRows;  // see run_many()
  const int64_t step = (few ? 512 : kBlocksStretch) / 32;
  const int64_t group = few ? 1 : kBlocksGroup;
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += kTokenStretch) {
    at.t1 = at.t0 + kTokenStretch < c.tokens ? at.t0 + kTokenStretch : c.tokens;
    for (at.first = first; at.first < last; at.first += group) {
      at.last = at.first + group < last ? at.first + group : last;
      for (at.b0 = 0; at.b0 < at.blocks; at.b0 += step) {
        at.b1 = at.b0 + step < at.blocks ? at.b0 + step : at.blocks;
        blocks_stretch(c, s, tiles, at);
      }
    }
  }
}

// One or two tokens, as a family of run_few().
template <class F, int kPlanes>
struct FamilyValues : FamilyBase {
  struct Source : Packed<F> {
    using Packed<F>::Packed;
  };
  static constexpr int kBlock = 32;
  static constexpr int64_t kRowBytes = 128 * kPlanes;
  const Bf16Layout layout;
  const MatmulCall& call;
  explicit FamilyValues(const MatmulCall& c) : layout(bf16_layout(c.cols)), call(c) {}

  template <int T>
  void prepare(const uint8_t* (&row)[T], int64_t b0, int64_t b1, uint8_t* to) const {
    for (int t = 0; t < T; ++t, to += (b1 - b0) * kRowBytes) {
      widen_row<kPlanes>(row[t], layout.fine, b0, b1, to);
      row[t] = to;
    }
  }
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    const uint8_t* sums[T];
    for (int t = 0; t < T; ++t) {
      sums[t] = act_row(call, t) + (kPlanes == 2 ? layout.sum16_fine : layout.sum16);
    }
    tile_values<F, T, kPlanes>(w, row, sums, b0, b1, acc);
  }
};

template <class F, int kPlanes>
void run_blocks_planes(const MatmulCall& c, int64_t first, int64_t last) {
  const unsigned before = flush_denormals();
  if (c.tokens == 1) {
    run_few<FamilyValues<F, kPlanes>, 1>(c, first, last);
  } else if (c.tokens == 2) {
    run_few<FamilyValues<F, kPlanes>, 2>(c, first, last);
  } else {
    blocks_many<F, kPlanes>(c, first, last);
  }
  restore_denormals(before);
}

template <class F>
void run_blocks(const MatmulCall& c, int64_t first, int64_t last) {
  if (uses_fine_plane(c.rows, c.cols)) {
    run_blocks_planes<F, 2>(c, first, last);
  } else {
    run_blocks_planes<F, 1>(c, first, last);
  }
}

}  // namespace
}  // namespace freshet::cpu

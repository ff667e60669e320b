// BF16 weights: packed lines are rows of tiles, and sums stay in tiles over a whole stretch of K.
#pragma once

#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

// Of K, panels and tokens that work goes on with before the next: tokens and panels stay in the L2
// cache, two tiles' worth of tokens in the L1 cache.
inline constexpr int kBf16Stretch = 512;
inline constexpr int kBf16Group = 8;
inline constexpr int64_t kBf16Tokens = 256;

template <int kPlanes>
struct Bf16Scratch {
  alignas(64) uint8_t rows[2][kPlanes * kTileRows * kCopyStride<kBf16Stretch * 2>];
  alignas(64) float sums[kBf16Group * kBf16Tokens * kPanelRows];
};

// One or two tiles of tokens (tiles 4 and 5) times one or two panels (6 and 7); the sums of token
// tile x and panel w are in tile 2 x + w, and in memory at sums[x] + w * kBf16Tokens rows.
template <int kX, int kW, int kPlanes>
FRESHET_INLINE void bf16_tiles(const TileRows (&rows)[2], const uint8_t* const (&panel)[2],
                               int64_t blocks, bool fresh, float* const (&sums)[2]) {
  constexpr int64_t kNext = kBf16Tokens * kPanelRows;
  if (fresh) {
    tile_zero<0>();
    if (kW > 1) tile_zero<1>();
    if (kX > 1) tile_zero<2>();
    if (kX > 1 && kW > 1) tile_zero<3>();
  } else {
    tile_load<0>(sums[0], kLine);
    if (kW > 1) tile_load<1>(sums[0] + kNext, kLine);
    if (kX > 1) tile_load<2>(sums[1], kLine);
    if (kX > 1 && kW > 1) tile_load<3>(sums[1] + kNext, kLine);
  }
  for (int64_t b = 0; b < blocks; ++b) {
    tile_load<6>(panel[0] + b * 1024, kLine);
    if (kW > 1) tile_load<7>(panel[1] + b * 1024, kLine);
    FRESHET_UNROLL
    for (int p = 0; p < kPlanes; ++p) {
      tile_load<4>(rows[0].plane[p] + b * 64, rows[0].stride);
      tile_dp_bf16<0, 4, 6>();
      if (kW > 1) tile_dp_bf16<1, 4, 7>();
      if (kX > 1) {
        tile_load<5>(rows[1].plane[p] + b * 64, rows[1].stride);
        tile_dp_bf16<2, 5, 6>();
        if (kW > 1) tile_dp_bf16<3, 5, 7>();
      }
    }
  }
  tile_store<0>(sums[0]);
  if (kW > 1) tile_store<1>(sums[0] + kNext);
  if (kX > 1) tile_store<2>(sums[1]);
  if (kX > 1 && kW > 1) tile_store<3>(sums[1] + kNext);
}

template <int kX, int kPlanes>
void bf16_token_tiles(const MatmulCall& c, Bf16Scratch<kPlanes>& s, const Stretch& at,
                      const TileRows (&rows)[2], int64_t t0, int64_t count) {
  const auto packed = [&](int64_t p) {
    return Packed<LinesBF16>(c, p < at.last ? p : at.first).main(at.b0);
  };
  for (int64_t p = at.first; p < at.last; p += 2) {
    float* const base = s.sums + ((p - at.first) * kBf16Tokens + (t0 - at.t0)) * kPanelRows;
    float* const sums[2] = {base, base + kTileRows * kPanelRows};
    const uint8_t* const panel[2] = {packed(p), packed(p + 1)};
    const int64_t blocks = at.b1 - at.b0;
    if (p + 1 < at.last) {
      bf16_tiles<kX, 2, kPlanes>(rows, panel, blocks, at.b0 == 0, sums);
    } else {
      bf16_tiles<kX, 1, kPlanes>(rows, panel, blocks, at.b0 == 0, sums);
    }
    if (at.b1 != at.blocks) continue;
    for (int64_t w = p; w < p + 2 && w < at.last; ++w) {
      const float* const from = base + (w - p) * kBf16Tokens * kPanelRows;
      for (int64_t t = 0; t < count; ++t) finish(c, w, t0 + t, load_f(from + t * kPanelRows));
    }
  }
}

template <int kPlanes>
void bf16_stretch(const MatmulCall& c, Bf16Scratch<kPlanes>& s, Tiles& tiles, const Stretch& at) {
  const int64_t fine = bf16_layout(c.cols).fine;
  const auto rows_at = [&](int64_t t, int64_t count, int copy) {
    return tile_rows_at<kPlanes, kBf16Stretch * 2>(c, fine, t, count, at.b0 * 64,
                                                   (at.b1 - at.b0) * 64, s.rows[copy]);
  };
  int64_t t = at.t0;
  for (; at.t1 - t >= 2 * kTileRows; t += 2 * kTileRows) {
    tiles.configure(kTileRows, 64);
    const TileRows rows[2] = {rows_at(t, kTileRows, 0), rows_at(t + kTileRows, kTileRows, 1)};
    bf16_token_tiles<2, kPlanes>(c, s, at, rows, t, 2 * kTileRows);
  }
  for (; t < at.t1; t += kTileRows) {
    const int64_t count = at.t1 - t < kTileRows ? at.t1 - t : kTileRows;
    tiles.configure(tile_height(count), 64);
    const TileRows rows[2] = {rows_at(t, count, 0), {}};
    bf16_token_tiles<1, kPlanes>(c, s, at, rows, t, count);
  }
}

template <int kPlanes>
void bf16_many(const MatmulCall& c, int64_t first, int64_t last) {
  Bf16Scratch<kPlanes> s;
  Tiles tiles;
  Stretch at{};
  at.blocks = blocks_of(c.cols, 32);
  // Few tokens read each panel from end to end, as it lies in memory.
  const bool few = c.tokens <= 2 * kTileRows;
  const int64_t step =
      few && c.rows_index == nullptr && c.tokens % kTileRows == 0 ? at.blocks : kBf16Stretch / 32;
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += kBf16Tokens) {
    at.t1 = at.t0 + kBf16Tokens < c.tokens ? at.t0 + kBf16Tokens : c.tokens;
    for (at.first = first; at.first < last; at.first += kBf16Group) {
      at.last = at.first + kBf16Group < last ? at.first + kBf16Group : last;
      for (at.b0 = 0; at.b0 < at.blocks; at.b0 += step) {
        at.b1 = at.b0 + step < at.blocks ? at.b0 + step : at.blocks;
        bf16_stretch(c, s, tiles, at);
      }
    }
  }
}

template <int kPlanes>
void run_bf16_planes(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= 2) return run_family<FamilyBf16<LinesBF16, kPlanes>>(c, first, last);
  const unsigned before = flush_denormals();
  bf16_many<kPlanes>(c, first, last);
  restore_denormals(before);
}

void run_bf16(const MatmulCall& c, int64_t first, int64_t last) {
  if (uses_fine_plane(c.rows, c.cols)) {
    run_bf16_planes<2>(c, first, last);
  } else {
    run_bf16_planes<1>(c, first, last);
  }
}

}  // namespace
}  // namespace freshet::cpu

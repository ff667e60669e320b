// GEMM with weights whose packed lines are rows of tiles (BF16, INT8). The sums stay in tiles over
// a stretch of K; for up to two tiles of tokens, over all of K.
//
// N provides Lines, the kPlanes and fine() of the activations, multiply<sums, x, w>(), the Scales
// of a step's tokens, and the Panel whose result() converts a sum to a value. A block of K is 64
// bytes of a row of activations, and a tile of a panel; with kSplit, two tiles, high and low, which
// split() makes of a stretch of a panel. High is multiplied by all planes, low by the first.
#pragma once

#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

// Blocks of K (half as many with two planes), panels and tokens that are processed before the next
// ones. Panels and sums stay in the L2 cache, a step's activations in the L1 cache.
inline constexpr int64_t kDepthBlocks = 16;
inline constexpr int kDepthStretchBytes = kDepthBlocks * 64;
inline constexpr int kDepthGroup = 16;
inline constexpr int64_t kDepthTokens = 256;
inline constexpr int64_t kSplitTokens = 512;  // splitting panels again costs more than L2 traffic
template <class N>
inline constexpr int64_t kTokensAtATime = N::kSplit ? kSplitTokens : kDepthTokens;
inline constexpr int64_t kStreamAhead = 4;  // blocks that each of two panels is prefetched to L1
inline constexpr int64_t kDepthSums = 4 * kTileInts;  // sums of a step and two panels
inline constexpr int64_t kTileBytes = kTileRows * kLine;

// What most Ns have in common.
struct NumbersBase {
  static constexpr bool kSplit = false;
  struct Scales {
    FRESHET_INLINE_MEMBER void read(const MatmulCall&, const Step&) {}
  };
  struct Panel {
    FRESHET_INLINE_MEMBER Panel(const MatmulCall&, int64_t) {}
    FRESHET_INLINE_MEMBER F32 result(const Scales&, int, F32 acc) const { return acc; }
  };
};

template <class N>
struct DepthScratch {
  static constexpr int64_t kPanelBytes = N::kSplit ? kDepthBlocks / N::kPlanes * 2 * kTileBytes : 0;
  alignas(64) uint8_t panels[kDepthGroup * kPanelBytes + 64];  // split
  alignas(64) uint8_t rows[kCopyBytes<N::kPlanes, kDepthStretchBytes>];
  alignas(64) float sums[kDepthGroup / 2 * kTokensAtATime<N> / (2 * kTileRows) * kDepthSums];
};

// A stretch of one or two panels times a step's tokens. The two panels are adjacent, or with SwiGLU
// the same panel of gate and up.
template <class N>
struct DepthProduct {
  const Step* step;
  const typename N::Scales* scales;
  float* sums;  // tile x, panel w: from (2 x + w) * kTileInts on
  int64_t panel;
  int panels;
  bool last;               // whether this is the rows' last stretch
  const uint8_t* next[2];  // what this product prefetches to L2 for the next stretch:
  int64_t lines;           // this many of each
};

// Runs products in sequence. The sums of one are stored between the tile instructions of the next,
// each tile just before it is reused, and finished between the next one's later blocks.
template <class N>
class DepthPipe {
  static constexpr int64_t kBlockBytes = N::kSplit ? 2 * kTileBytes : kTileBytes;  // of a panel

 public:
  // streams: whole panels are read in sequence from memory. usual: the denormal mode outside of
  // GEMMs.
  DepthPipe(const MatmulCall& call, const MatmulCall& gate_call, bool streams, unsigned usual)
      : c(call), gate(gate_call), streaming(streams), denormals(usual) {}

  // x_at: where the stretch begins in the rows. fresh: there are no sums yet.
  void run(DepthProduct<N>& p, const uint8_t* const (&panel)[2], int64_t x_at, int64_t blocks,
           bool fresh) {
    const auto run =
        p.step->tiles == 2
            ? (p.panels == 2 ? &DepthPipe::template tiles<2, 2> : &DepthPipe::template tiles<2, 1>)
            : (p.panels == 2 ? &DepthPipe::template tiles<1, 2> : &DepthPipe::template tiles<1, 1>);
    (this->*run)(p, panel, x_at, blocks, fresh);
    before = p;
    if (p.last) before.sums = finishing;
    quick = p.last && p.panels == 2 && p.step->plain() && c.gate == nullptr &&
            ends_plainly(c, p.panel + 1);
  }
  void drain() {
    tile_store<0>(before.sums);
    tile_store<1>(before.sums + kTileInts);
    tile_store<2>(before.sums + 2 * kTileInts);
    tile_store<3>(before.sums + 3 * kTileInts);
    if (before.last) finish_before(0, before.step->count);
    before.sums = finishing;
    before.last = quick = false;
  }

 private:
  // Prefetches the data kStreamAhead blocks further in the panels, or in the next two panels.
  FRESHET_INLINE_MEMBER void fetch(const uint8_t* const (&panel)[2], int64_t b, int64_t blocks) {
    const int64_t over = b + kStreamAhead >= blocks ? 2 * bytes - blocks * kTileBytes : 0;
    const int64_t at = (b + kStreamAhead) * kTileBytes + over;
    FRESHET_UNROLL
    for (int i = 0; i < kTileBytes; i += kLine) {
      prefetch_near(panel[0] + at + i);
      prefetch_near(panel[1] + at + i);
    }
  }
  // Prefetches one block's share of p.next. due: the remainder from earlier blocks, in lines times
  // blocks.
  FRESHET_INLINE_MEMBER void fetch_next(DepthProduct<N>& p, int64_t& due, int64_t blocks) {
    for (due += p.lines; due >= blocks; due -= blocks) {
      prefetch(p.next[0]);
      prefetch(p.next[1]);
      p.next[0] += kLine;
      p.next[1] += kLine;
    }
  }
  template <int kTile>
  FRESHET_INLINE_MEMBER void begin(const float* sums, bool fresh) {
    tile_store<kTile>(before.sums + kTile * kTileInts);
    if (fresh) {
      tile_zero<kTile>();
    } else {
      tile_load<kTile>(sums + kTile * kTileInts, kLine);
    }
  }
  // With few tokens panels are read through the L1 cache; with many, it keeps the activations.
  template <int kTile>
  FRESHET_INLINE_MEMBER void load_panel(const uint8_t* from) {
    if (streaming) {
      tile_load<kTile>(from, kLine);
    } else {
      tile_load_once<kTile>(from, kLine);
    }
    tile_load_gap();
  }
  template <int kTile>
  FRESHET_INLINE_MEMBER void load_tokens(const uint8_t* from, int64_t stride) {
    tile_load<kTile>(from, stride);
    tile_load_gap();
  }
  template <int kTile, int kX, int kW>
  FRESHET_INLINE_MEMBER void multiply() {
    N::template multiply<kTile, kX, kW>();
    tile_product_gap();
  }
  // Multiplies each block by the coarse plane, then by the fine plane.
  template <int kX, int kW, bool kFirst>
  FRESHET_INLINE_MEMBER void block(const DepthProduct<N>& p, const uint8_t* const (&panel)[2],
                                   const uint8_t* const (&x)[2], int64_t b, bool fresh) {
    const int64_t stride = p.step->stride;
    FRESHET_UNROLL
    for (int plane = 0; plane < N::kPlanes; ++plane) {
      const int64_t at = plane * p.step->fine + b * 64;
      const bool first = kFirst && plane == 0;
      if (plane == 0) load_panel<6>(panel[0] + b * kBlockBytes);
      load_tokens<4>(x[0] + at, stride);
      if (first) begin<0>(p.sums, fresh);
      multiply<0, 4, 6>();
      if (kW == 2 && plane == 0) load_panel<7>(panel[1] + b * kBlockBytes);
      if (first) begin<1>(p.sums, fresh);
      if (kW == 2) multiply<1, 4, 7>();
      if (kX == 2) load_tokens<5>(x[1] + at, stride);
      if (first) begin<2>(p.sums, fresh);
      if (kX == 2) multiply<2, 5, 6>();
      if (first) begin<3>(p.sums, fresh);
      if (kX == 2 && kW == 2) multiply<3, 5, 7>();
    }
    if constexpr (N::kSplit) {
      load_panel<6>(panel[0] + b * kBlockBytes + kTileBytes);
      load_tokens<4>(x[0] + b * 64, stride);
      multiply<0, 4, 6>();
      if (kW == 2) load_panel<7>(panel[1] + b * kBlockBytes + kTileBytes);
      if (kW == 2) multiply<1, 4, 7>();
      if (kX == 2) load_tokens<5>(x[1] + b * 64, stride);
      if (kX == 2) multiply<2, 5, 6>();
      if (kX == 2 && kW == 2) multiply<3, 5, 7>();
    }
  }
  template <int kX, int kW>
  void tiles(DepthProduct<N>& p, const uint8_t* const (&panel)[2], int64_t x_at, int64_t blocks,
             bool fresh) {
    const uint8_t* const x[2] = {p.step->x[0] + x_at, p.step->x[1] + x_at};
    int64_t lines_due = 0;
    if (streaming) fetch(panel, 0, blocks);
    fetch_next(p, lines_due, blocks);
    block<kX, kW, true>(p, panel, x, 0, fresh);
    const auto others = [&](const auto& finish_some) __attribute__((always_inline)) {
      for (int64_t b = 1; b < blocks; ++b) {
        if (streaming) fetch(panel, b, blocks);
        fetch_next(p, lines_due, blocks);
        block<kX, kW, false>(p, panel, x, b, fresh);
        finish_some(b);
      }
    };
    if (quick) {
      if (c.add) {
        finish_quickly<true>(others);
      } else {
        finish_quickly<false>(others);
      }
      return;
    }
    const int left = before.last ? before.step->count : 0;
    int done = 0;
    others([&](int64_t b) __attribute__((always_inline)) {
      int due = static_cast<int>(left * b / blocks);
      if (c.gate != nullptr) due &= ~3;  // glu() takes a few tokens at a time
      if (due > done) finish_before(done, due);
      done = due;
    });
    if (left > done) finish_before(done, left);
  }
  // Finishes the previous product, two tokens per block: two whole panels of a full step, without a
  // bias.
  template <bool kAdd, class Others>
  FRESHET_INLINE_MEMBER void finish_quickly(const Others& others) {
    const typename N::Panel first(c, before.panel), second(c, before.panel + 1);
    const typename N::Scales& scales = *before.scales;
    const int64_t stride = c.out_stride;
    const F32 scale = set_f(c.scale);
    float* out = c.out + before.step->t0 * stride + before.panel * kPanelRows;
    int t = 0;
    const auto two = [&] __attribute__((always_inline)) {
      const float* sums = finishing + t / kTileRows * 2 * kTileInts + t % kTileRows * kPanelRows;
      FRESHET_UNROLL
      for (int i = 0; i < 2; ++i, ++t, out += stride, sums += kPanelRows) {
        const F32 a = first.result(scales, t, load_f(sums));
        const F32 b = second.result(scales, t, load_f(sums + kTileInts));
        finish_plainly<kAdd>(out, a, scale);
        finish_plainly<kAdd>(out + kPanelRows, b, scale);
      }
    };
    others([&](int64_t) __attribute__((always_inline)) {
      if (t < 2 * kTileRows) two();
    });
    while (t < 2 * kTileRows) two();
  }
  // Finishes tokens [first, last) of the previous product.
  __attribute__((noinline)) void finish_before(int first, int last) const {
    if (c.gate != nullptr) return gate_before(first, last);
    const Step& s = *before.step;
    const MatmulCall call = c;  // keeps it in registers: results might alias c
    for (int w = 0; w < before.panels; ++w) {
      const typename N::Panel panel(c, before.panel + w);
      const float* const sums = before.sums + w * kTileInts;
      for (int t = first; t < last; ++t) {
        const int row = s.row(t), skip = row < kTileRows ? 0 : kTileInts;
        const F32 sum = load_f(sums + row * kPanelRows + skip);
        finish(call, before.panel + w, s.t0 + t, panel.result(*before.scales, t, sum));
      }
    }
  }

  void gate_before(int first, int last) const {
    const Step& s = *before.step;
    const typename N::Panel of_gate(gate, before.panel), of_up(c, before.panel);
    GatedUnits units;
    for (int t = first; t < last; ++t) {
      const int row = s.row(t), skip = row < kTileRows ? 0 : kTileInts;
      const float* const sums = before.sums + row * kPanelRows + skip;
      const F32 g = of_gate.result(*before.scales, t, load_f(sums));
      const F32 u = of_up.result(*before.scales, t, load_f(sums + kTileInts));
      units.put(t - first, finished(gate, before.panel, g), finished(c, before.panel, u));
    }
    if constexpr (N::kFlush) restore_denormals(denormals);
    units.finish(c, before.panel, s.t0 + first, last - first);
    if constexpr (N::kFlush) flush_denormals();
  }

  const MatmulCall& c;
  const MatmulCall& gate;
  const bool streaming;
  const unsigned denormals;
  const int64_t bytes = panel_bytes(Packed<typename N::Lines>::kLayout, c.cols);
  alignas(64) float finishing[kDepthSums];  // last stretch's sums; at first the tiles' content
  DepthProduct<N> before{nullptr, nullptr, finishing, 0, 0, false, {}, 0};
  bool quick = false;  // `before` can end in finish_quickly()
};

// The blocks that follow a stretch. They are in panels `panels` further on (the next group's, or 0
// for the same ones), up to `end`.
struct NextStretch {
  int64_t panels;
  int64_t end;
  int64_t b0, blocks;
};

template <class N>
void depth_stretch(const MatmulCall& c, const MatmulCall& gate, DepthScratch<N>& s,
                   DepthPipe<N>& pipe, const Stretch& at, const NextStretch& next) {
  using Lines = Packed<typename N::Lines>;
  const bool gated = c.gate != nullptr;
  const int aside = gated ? 0 : 1;  // from a product's first panel to its second
  const int64_t fine = N::fine(c);
  Step steps[2];  // this one, and the previous one whose last sums are not stored yet
  typename N::Scales scales[2];
  const bool last = at.b1 == at.blocks;
  float* sums = s.sums;
  if constexpr (N::kSplit) {
    for (int64_t p = at.first; p < at.last; ++p) {
      uint8_t* const to = s.panels + (p - at.first) * DepthScratch<N>::kPanelBytes;
      N::split(Lines(c, p).main(at.b0), at.b1 - at.b0, to);
    }
  }
  // Split panels have no gate (IsaKernels::gates).
  const auto panel_at = [&](const MatmulCall& call, int64_t p) -> const uint8_t* {
    if constexpr (N::kSplit) return s.panels + (p - at.first) * DepthScratch<N>::kPanelBytes;
    return Lines(call, p).main(at.b0);
  };
  int i = 0;
  for (int64_t t = at.t0; t < at.t1; t += steps[i].count, i ^= 1) {
    Step& step = steps[i];
    step = Step(c, t, at.t1 - t, 2, fine);
    if (last) scales[i].read(c, step);
    const int64_t lines = next.blocks * (Lines::kLayout.main / kLine), tokens = at.t1 - at.t0;
    const int64_t line = lines * (t - at.t0) / tokens,
                  end_line = lines * (t - at.t0 + step.count) / tokens;
    int64_t x_at = at.b0 * 64;
    if (c.rows_index != nullptr) {
      step.gather<N::kPlanes, kDepthStretchBytes>(c, fine, x_at, (at.b1 - at.b0) * 64, s.rows);
      x_at = 0;
    }
    for (int64_t p = at.first; p < at.last; p += 1 + aside, sums += kDepthSums) {
      const int panels = p + aside < at.last ? 2 : 1;
      const uint8_t* const panel[2] = {panel_at(gate, p), panel_at(c, panels == 2 ? p + aside : p)};
      DepthProduct<N> product{&step, &scales[i], sums, p, panels, last, {}, 0};
      if (p + next.panels < next.end) {
        product.lines = end_line - line;
        const int64_t of = p + next.panels, second = of + aside < next.end ? of + aside : of;
        product.next[0] = Lines(gate, of).main(next.b0) + line * kLine;
        product.next[1] = Lines(c, second).main(next.b0) + line * kLine;
      }
      pipe.run(product, panel, x_at, at.b1 - at.b0, at.b0 == 0);
    }
  }
  pipe.drain();
}

template <class N>
void depth_many(const MatmulCall& c, int64_t first, int64_t last) {
  // With few tokens each panel is read from end to end, in memory order.
  const bool few = !N::kSplit && c.tokens <= 2 * kTileRows && c.rows_index == nullptr;
  const unsigned denormals = N::kFlush ? flush_denormals() : 0;
  const MatmulCall gate = gate_of(c);
  DepthScratch<N> s;
  DepthPipe<N> pipe(c, gate, few, denormals);
  Tiles tiles;
  tiles.configure(tile_height(c), 64);
  Stretch at{};
  at.blocks = blocks_of(c.cols, Packed<typename N::Lines>::kLayout.block);
  const int64_t step = few ? at.blocks : kDepthBlocks / N::kPlanes;
  const int64_t tokens = tokens_at_a_time(c.tokens, kTokensAtATime<N>);
  const int group = c.gate != nullptr ? kDepthGroup / 2 : kDepthGroup;  // gate and up each
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += tokens) {
    at.t1 = at.t0 + tokens < c.tokens ? at.t0 + tokens : c.tokens;
    for (at.first = first; at.first < last; at.first += group) {
      at.last = at.first + group < last ? at.first + group : last;
      for (at.b0 = 0; at.b0 < at.blocks; at.b0 += step) {
        at.b1 = at.b0 + step < at.blocks ? at.b0 + step : at.blocks;
        NextStretch next{0, last, at.b1, at.blocks - at.b1};
        if (next.blocks == 0) next = {group, last, 0, at.blocks};
        if (next.blocks > step) next.blocks = step;
        if (few) next.blocks = 0;  // panels are already read in sequence
        depth_stretch<N>(c, gate, s, pipe, at, next);
      }
    }
  }
  if (N::kFlush) restore_denormals(denormals);
}

}  // namespace
}  // namespace freshet::cpu

// The loop nest around GEMMs of blocks on tiles (matmul_amx_pipe.inl), and run_blocks(), the entry
// point per format in the IsaKernels tables.
//
// With many tokens, a block of 16 panels is unpacked to the L2 cache while all tokens are
// multiplied by the previous one. With few tokens, a block of one panel is unpacked to the L1 cache
// between the multiplications of the previous block.
#pragma once

#include <new>

#include "backend/cpu/matmul_amx_pipe.inl"

namespace freshet::cpu {
namespace {

// Panels and tokens that are processed before the next block of K. The unpacked panels and the sums
// stay in the L2 cache, a step's activations of the block in the L1 cache.
inline constexpr int kBlocksGroup = 16;
inline constexpr int64_t kBlocksTokens = 512;

template <class F>
struct BlocksScratch {
  alignas(64) uint8_t panels[2][kBlocksGroup * Unit<F>::kBytes];  // for this block and the next
  alignas(64) uint8_t rows[kCopyBytes<2, kUnitK>];
  // For the blocks that are being summed, and for those that follow them.
  alignas(64) uint8_t offsets[2][kOffsets<F> ? kBlocksGroup * kPanelOffsets : kLine];
  RowSums row_sums;
  alignas(64) float sums[kBlocksGroup * kBlocksTokens * kPanelRows];
};

FRESHET_INLINE void put_panel_offsets(const uint8_t* main, int64_t block, int64_t blocks,
                                      uint8_t* to) {
  put_offsets(main, block, block + 1 == blocks, to + block % kOffsetBlocks / 4 * kOffsetTile);
}

// Unpacks one block of several panels, 32 values at a time.
template <class F>
class Unpacking {
 public:
  explicit Unpacking(const MatmulCall& call) : c(call) {}
  void begin(int64_t first, int64_t end, int64_t of, uint8_t* where, uint8_t* offsets_where) {
    panel = first, last = end, block = of, to = where, offsets = offsets_where;
  }
  int64_t left() const { return (last - panel) * 8 - j; }
  __attribute__((noinline)) void step() {
    if (j == 0) new (room) Open(c, panel, block);
    const Open& open = *reinterpret_cast<const Open*>(room);
    open.block.ahead(j);
    Unit<F>::unpack_any(open.block, j, to);
    if (++j < 8) return;
    Unit<F>::unpack_scales(open.block, to + Unit<F>::kPlanesBytes);
    if constexpr (kOffsets<F>) {
      put_panel_offsets(open.block.main, block, open.panel.blocks, offsets);
      offsets += kPanelOffsets;
    }
    j = 0;
    ++panel;
    to += Unit<F>::kBytes;
  }
  void rest() {
    while (left() > 0) step();
  }

 private:
  struct Open {
    TilePacked<F> panel;
    decltype(panel.block(0)) block;
    Open(const MatmulCall& c, int64_t p, int64_t b) : panel(c, p), block(panel.block(b)) {}
  };
  const MatmulCall& c;
  int64_t panel = 0, last = 0, block = 0;
  uint8_t* to = nullptr;
  uint8_t* offsets = nullptr;
  int j = 0;
  alignas(64) uint8_t room[sizeof(Open)];
};

// The rows and records of the next step, which this step's panels prefetch to the L2 cache: two
// rows per panel (one if both planes are used).
template <int kPlanes>
struct Fetch {
  const uint8_t* x[2];
  const uint8_t* records[2];
  const uint8_t* sums[2];
  // sums_at: where the sums for the offsets begin in a row, or 0.
  Fetch(const MatmulCall& c, int64_t fine, int64_t t, int64_t b, int64_t panel, int64_t sums_at) {
    const Q8x256Layout l = q8x256_layout(c.cols);
    for (int i = 0; i < 2; ++i) {
      const int64_t wanted = t + panel * (2 / kPlanes) + (kPlanes == 2 ? 0 : i);
      const uint8_t* const row = act_row(c, wanted < c.tokens ? wanted : c.tokens - 1);
      x[i] = row + b * kUnitK + (kPlanes == 2 ? i * fine : 0);
      records[i] = row + l.records + (b * 2 + (kPlanes == 2 ? i : 0)) * kLine;
      sums[i] = sums_at == 0 ? nullptr : row + sums_at;
    }
  }
  FRESHET_INLINE_MEMBER void operator()(int k, int i) const {
    if (i > 1) return;
    prefetch(x[i] + k * kLine);
    if (k == 3) prefetch(records[i]);
    if (sums[i] != nullptr) prefetch(sums[i] + k * kLine);
  }
};

// Multiplies block at.b0 of a group of panels by the tokens at.t0 .. at.t1, and unpacks `next`
// meanwhile.
template <class F, int kPlanes>
void blocks_stretch(const MatmulCall& c, BlocksScratch<F>& s, Pipe<F, kPlanes, true>& pipe,
                    const Stretch& at, Tokens<kPlanes>* steps, const uint8_t* units,
                    const uint8_t* offsets, Unpacking<F>& next) {
  const bool adds = kOffsets<F> && ends_offsets(at.b0, at.blocks);
  const int64_t b = at.b0, panels = at.last - at.first, fine = q8x256_layout(c.cols).fine;
  const int64_t products = panels * blocks_of(at.t1 - at.t0, kMostRows / kPlanes);
  const int64_t unpackings = next.left();
  int64_t due = 0;
  Records<F, kPlanes> records[2];  // of this step, and of the last one while its sums are scaled
  float* sums = s.sums;
  int which = 0;
  for (int64_t t = at.t0; t < at.t1; t += steps++->count, which ^= 1) {
    Tokens<kPlanes>& x = *steps;
    records[which].read(x, b);
    int64_t x_at = b * kUnitK;
    if (c.rows_index != nullptr) {
      x.template gather<kPlanes, kUnitK>(c, fine, x_at, kUnitK, s.rows);
      x_at = 0;
    }
    if (adds) s.row_sums.read(c, x, b);
    const bool over = t + x.count >= at.t1 && b + 1 < at.blocks;
    const int64_t then = over ? b + 1 : b;
    const int64_t sums_then = kOffsets<F> && ends_offsets(then, at.blocks)
                                  ? q8x256_layout(c.cols).sums + offsets_of(then)
                                  : 0;
    for (int64_t p = 0; p < panels; ++p, sums += kMostRows / kPlanes * kPanelRows) {
      const uint8_t* const unit = units + p * Unit<F>::kBytes;
      const Product<F, kPlanes> product{unit,
                                        unit + Unit<F>::kPlanesBytes,
                                        &x,
                                        &records[which],
                                        sums,
                                        at.first + p,
                                        b,
                                        b + 1 == at.blocks,
                                        adds ? offsets + p * kPanelOffsets : nullptr,
                                        &s.row_sums};
      const Fetch<kPlanes> fetch(c, fine, over ? at.t0 : t + x.count, then, p, sums_then);
      due += unpackings;
      pipe.run(product, x_at, [&](int k, int i) __attribute__((always_inline)) {
        fetch(k, i);
        if (k == 0 && i == 0) {
          for (; due >= products; due -= products) next.step();
        }
      });
      if (product.last) {
        for (int r = 0; r < x.count; ++r) {
          prefetch(c.out + (t + r) * c.out_stride + (at.first + p + 2) * kPanelRows);
        }
      }
    }
  }
  pipe.drain();
}

template <class F, int kPlanes>
void blocks_many(const MatmulCall& c, int64_t first, int64_t last) {
  BlocksScratch<F> s;
  Pipe<F, kPlanes, true> pipe(c);
  Unpacking<F> next(c);
  Tokens<kPlanes> steps[kBlocksTokens * kPlanes / kMostRows];
  Tiles tiles;
  tiles.configure(tile_height(c), kLine);
  Stretch at{};
  at.blocks = blocks_of(c.cols, kUnitK);
  const auto end = [&](int64_t group) {
    return group + kBlocksGroup < last ? group + kBlocksGroup : last;
  };
  const int64_t tokens = tokens_at_a_time(c.tokens, kBlocksTokens);
  int now = 0, offsets = 0;
  next.begin(first, end(first), 0, s.panels[now], s.offsets[offsets]);
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += tokens) {
    at.t1 = at.t0 + tokens < c.tokens ? at.t0 + tokens : c.tokens;
    Tokens<kPlanes>* step = steps;
    for (int64_t t = at.t0; t < at.t1; t += step++->count) {
      *step = Tokens<kPlanes>(c, t, at.t1 - t);
    }
    for (at.first = first; at.first < last; at.first += kBlocksGroup) {
      at.last = end(at.first);
      for (at.b0 = 0; at.b0 < at.blocks; ++at.b0, now ^= 1) {
        next.rest();
        uint8_t *const to = s.panels[now ^ 1],
                       *const offsets_to =
                           s.offsets[offsets ^ (ends_offsets(at.b0, at.blocks) ? 1 : 0)];
        if (at.b0 + 1 < at.blocks) {
          next.begin(at.first, at.last, at.b0 + 1, to, offsets_to);
        } else if (at.last < last) {
          next.begin(at.last, end(at.last), 0, to, offsets_to);
        } else if (at.t1 < c.tokens) {
          next.begin(first, end(first), 0, to, offsets_to);
        }
        blocks_stretch<F, kPlanes>(c, s, pipe, at, steps, s.panels[now], s.offsets[offsets], next);
        if (ends_offsets(at.b0, at.blocks)) offsets ^= 1;
      }
    }
  }
}

// The order in which few tokens go through the blocks of panels: all panels of a group use one
// block of the activations, which stays in the L1 cache, before the next.
struct BlockWalk {
  static constexpr int64_t kGroup = 16;
  int64_t blocks, last;
  int64_t group;  // its first panel
  int64_t panel;
  int64_t block = 0;
  BlockWalk(int64_t of, int64_t first, int64_t end)
      : blocks(of), last(end), group(first), panel(first) {}
  bool over() const { return panel >= last; }
  // Like next(), but continues past the last panel: a call covers a few of the panels that its
  // thread takes in sequence.
  void next_of(int64_t panels) {
    next();
    if (over()) last = panels;
  }
  void next() {
    const int64_t end = group + kGroup < last ? group + kGroup : last;
    if (++panel < end) return;
    panel = group;
    if (++block < blocks) return;
    block = 0;
    panel = group = end;
  }
};

// A packed block, or an arbitrary one past the end.
template <class F>
struct WalkedBlock {
  TilePacked<F> panel;
  decltype(panel.block(0)) view;
  WalkedBlock(const MatmulCall& c, const BlockWalk& at)
      : panel(c, at.over() ? at.last - 1 : at.panel), view(panel.block(at.over() ? 0 : at.block)) {}
};

// With few tokens a block is used once or twice. It is unpacked to the L1 cache between the
// multiplications of the previous block, and overwrites that block one quarter after the last
// multiplication that reads it.
template <class F, int kPlanes, int kSteps>
void blocks_few(const MatmulCall& c, int64_t first, int64_t last) {
  using U = Unit<F>;
  constexpr int64_t kHeld = 32;  // blocks whose records are kept
  alignas(64) uint8_t unit[U::kPlanesBytes];
  alignas(64) uint8_t scales[2][U::kScalesBytes];
  alignas(64) uint8_t room[2][sizeof(WalkedBlock<F>)];
  alignas(64) uint8_t offsets[BlockWalk::kGroup][kOffsets<F> ? kPanelOffsets : kLine];
  alignas(64) float sums[kSteps][BlockWalk::kGroup][kMostRows * kPanelRows];
  Records<F, kPlanes> records[kSteps][kHeld];
  RowSums row_sums[kSteps];
  Pipe<F, kPlanes, false> pipe(c);
  Tiles tiles;
  tiles.configure(tile_height(c), kLine);
  Tokens<kPlanes> steps[kSteps];
  int64_t t = 0;
  for (Tokens<kPlanes>& x : steps) {
    x = Tokens<kPlanes>(c, t, c.tokens - t);
    t += x.count;
  }
  const int64_t blocks = blocks_of(c.cols, kUnitK);
  BlockWalk at(blocks, first, last), next = at, far = at;
  const int64_t panels = blocks_of(c.rows, kPanelRows);
  for (int i = 0; i < kFarBlocks; ++i) far.next_of(panels);
  const WalkedBlock<F>* block = new (room[0]) WalkedBlock<F>(c, at);
  for (int j = 0; j < 8; ++j) U::unpack_any(block->view, j, unit);
  const auto finish_unpacking = [&](const WalkedBlock<F>& from, const BlockWalk& walk,
                                    uint8_t* to) __attribute__((always_inline)) {
    U::unpack_scales(from.view, to);
    if constexpr (kOffsets<F>) {
      if (walk.over()) return;
      put_panel_offsets(from.view.main, walk.block, blocks, offsets[walk.panel - walk.group]);
    }
  };
  finish_unpacking(*block, at, scales[0]);
  for (int now = 0; !at.over(); at = next, now ^= 1) {
    next.next();
    BlockWalk ahead = next;
    ahead.next();
    const WalkedBlock<F>* const coming = new (room[now ^ 1]) WalkedBlock<F>(c, next);
    far.next_of(panels);
    const Packed256<F> panel_ahead(c, ahead.over() ? first : ahead.panel);
    const Packed256<F> panel_far(c, far.over() ? first : far.panel);
    const auto unpack = [&](int j) __attribute__((always_inline)) {
      fetch_eighth<F, true>(panel_ahead, ahead.block, j);
      fetch_eighth<F, false>(panel_far, far.block, j);
      U::unpack_one(j < 2 ? block->view : coming->view, (j + 6) % 8, unit);
    };
    const bool adds = kOffsets<F> && ends_offsets(at.block, blocks);
    for (int q = 0; q < kSteps; ++q) {
      if (adds && at.panel == at.group) row_sums[q].read(c, steps[q], at.block);
      Records<F, kPlanes>& record = records[q][at.block % kHeld];
      if (at.panel == first || blocks > kHeld) record.read(steps[q], at.block);
      const Product<F, kPlanes> product{unit,
                                        scales[now],
                                        &steps[q],
                                        &record,
                                        sums[q][at.panel - at.group],
                                        at.panel,
                                        at.block,
                                        at.block + 1 == blocks,
                                        adds ? offsets[at.panel - at.group] : nullptr,
                                        &row_sums[q]};
      pipe.run(product, at.block * kUnitK, [&](int k, int i) __attribute__((always_inline)) {
        if (q != (k == 0 ? 0 : kSteps - 1)) return;
        if (i == 0) unpack(k * 2);
        if (i == (U::kBytePlanes == 2 ? 2 : 0)) unpack(k * 2 + 1);
      });
    }
    finish_unpacking(*coming, next, scales[now ^ 1]);
    block = coming;
  }
  pipe.drain();
}

// Up to this many tokens, unpacking for the tiles costs more than the tiles save.
inline constexpr int64_t kFewTokens = 8;

template <class F, int kPlanes>
void run_blocks_planes(const MatmulCall& c, int64_t first, int64_t last) {
  constexpr int64_t kStep = kMostRows / kPlanes;
  if (c.tokens > 2 * kStep || c.rows_index != nullptr) {
    blocks_many<F, kPlanes>(c, first, last);
  } else if (c.tokens > kStep) {
    blocks_few<F, kPlanes, 2>(c, first, last);
  } else {
    blocks_few<F, kPlanes, 1>(c, first, last);
  }
}

template <class F, template <class, int> class Exact, template <class, int> class Bytes>
void run_rounded(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= 4 && c.cols <= kMostVectorCols) {
    if (c.tokens == 1) return rounded_vectors<Exact, F, 1>(c, first, last);
    if (c.tokens == 2) return rounded_vectors<Exact, F, 2>(c, first, last);
    if (c.tokens == 3) return rounded_vectors<Bytes, F, 3>(c, first, last);
    return rounded_vectors<Bytes, F, 4>(c, first, last);
  }
  if (c.tokens <= kTileRows && c.rows_index == nullptr) return rounded_tiles<F>(c, first, last);
  run_blocks_planes<F, 1>(c, first, last);
}

template <class F>
void run_blocks(const MatmulCall& c, int64_t first, int64_t last) {
  if (first >= last) return;  // a thread may have no panels
  if constexpr (F::kFormat == Format::kQ4_0) {
    if (!uses_fine_plane(c.rows, c.cols)) {
      return run_rounded<RoundedQ4_0, ExactEighths, ByteEighths>(c, first, last);
    }
  } else if constexpr (F::kFormat == Format::kQ4_K) {
    if (!uses_fine_plane(c.rows, c.cols)) {
      const unsigned before = flush_denormals();  // as BF16 tiles do
      run_rounded<RoundedQ4_K, ExactQuarters, ByteQuarters>(c, first, last);
      return restore_denormals(before);
    }
  }
  if (c.tokens <= kFewTokens) {
    kAvx512VnniKernels.run[static_cast<int>(F::kFormat)](c, first, last);
  } else if (uses_fine_plane(c.rows, c.cols)) {
    run_blocks_planes<F, 2>(c, first, last);
  } else {
    run_blocks_planes<F, 1>(c, first, last);
  }
}

// In the order of Format, from Format::kQ4_0 on.
#define FRESHET_TILE_BLOCKS                                                                       \
  run_blocks<BlockQ4_0>, run_blocks<BlockQ4_1>, run_blocks<BlockQ5_0>, run_blocks<BlockQ5_1>,     \
      run_blocks<BlockQ8_0>, run_blocks<BlockQ2_K>, run_blocks<BlockQ3_K>, run_blocks<BlockQ4_K>, \
      run_blocks<BlockQ5_K>, run_blocks<BlockQ6_K>, run_blocks<BlockIQ4_NL>,                      \
      run_blocks<BlockIQ4_XS>, run_blocks<BlockMXFP4>, run_blocks<BlockInt4<128>>, nullptr,       \
      nullptr, nullptr, nullptr, nullptr, nullptr, run_blocks<BlockInt<2, 128>>, nullptr,         \
      run_blocks<BlockInt<3, 128>>

}  // namespace
}  // namespace freshet::cpu

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

inline constexpr int kMostRows = 2 * kTileRows;  // of sums in the tiles
inline constexpr int64_t kUnitK = 256;

// Shifts each group of four bytes by one, without the port that shifts take.
FRESHET_INLINE I32 byte_up(I32 v) {
  return _mm512_shuffle_epi8(v, _mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080));
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

  // Four numbers of each row (unsigned bytes, 2^kShift too high) times the rows' scales (in both
  // halves), as low and high bytes. Whatever is not a multiplication is done without shifts where
  // it can be: those take the multiplications' port.
  FRESHET_INLINE void put_products(I32 line, I32 scale, I32 too_much, uint8_t* to) {
    I32 even = _mm512_mullo_epi16(_mm512_and_si512(line, _mm512_set1_epi16(0xff)), scale);
    I32 odd = _mm512_mullo_epi16(_mm512_srli_epi16(line, 8), scale);
    if constexpr (F::kShift > 0) {
      even = _mm512_sub_epi16(even, too_much);
      odd = _mm512_sub_epi16(odd, too_much);
    }
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
    const I32 swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
    store_i(to, _mm512_mask_shuffle_epi8(even, kOdd, odd, swap));
    if constexpr (kBytePlanes == 2) {
      store_i(to + kPlane, _mm512_mask_shuffle_epi8(odd, ~kOdd, even, swap));
    }
  }
  // Numbers [32 j, 32 j + 32) of a block.
  template <class View>
  FRESHET_INLINE void unpack_sub(const View& block, int j, uint8_t* to) {
    block.ahead(j);
    const bool is = j < block.subs();
    const auto lines = block.sub(is ? j : 0);
    FRESHET_UNROLL
    for (int i = 0; i < 8; ++i) {
      const I32 group = block.group_scale((j * 32 + i * 4) / F::kGroup);
      const I32 scale = is ? halves(group, group) : zero_i();
      put_products(lines.line(i), scale, _mm512_slli_epi16(scale, F::kShift),
                   to + (j * 8 + i) * kLine);
    }
  }
  // What scaling needs.
  template <class View>
  FRESHET_INLINE void unpack_scales(const View& block, uint8_t* to) {
    FRESHET_UNROLL
    for (int i = 0; i < kPairs; ++i) store_i(to + kPairsAt + i * kLine, block.pair(i));
    store_i(to + kDAt, bits_i(block.d()));
    if constexpr (F::kAffine) store_i(to + kDAt + kLine, bits_i(block.dmin()));
  }
  // The same, j not known when compiling.
  template <class View>
  __attribute__((noinline)) static void unpack_any(const View& block, int j, uint8_t* to) {
    switch (j) {
      case 0:
        return unpack_sub(block, 0, to);
      case 1:
        return unpack_sub(block, 1, to);
      case 2:
        return unpack_sub(block, 2, to);
      case 3:
        return unpack_sub(block, 3, to);
      case 4:
        return unpack_sub(block, 4, to);
      case 5:
        return unpack_sub(block, 5, to);
      case 6:
        return unpack_sub(block, 6, to);
      default:
        return unpack_sub(block, 7, to);
    }
  }
  static void unpack(const Packed256<F>& from, int64_t b, uint8_t* to) {
    const auto block = from.block(b);
    FRESHET_UNROLL
    for (int j = 0; j < 8; ++j) unpack_sub(block, j, to);
    unpack_scales(block, to);
  }
};

// A step's tokens, and what scaling their sums needs. Where both planes count, they are the two
// operands of one tile's tokens.
template <int kPlanes>
struct Tokens : Step {
  const uint8_t* records[kMostRows];  // of each token
  int place[kMostRows];               // where its whole-number sums are stored

  Tokens() = default;
  Tokens(const MatmulCall& c, int64_t first, int64_t left)
      : Step(c, first, left, 2 / kPlanes, q8x256_layout(c.cols).fine) {
    const int64_t at = q8x256_layout(c.cols).records;
    for (int t = 0; t < count; ++t) {
      const int r = row(t);
      records[t] = act_row(c, t0 + t) + at;
      place[t] = r / kTileRows * 2 * kTileInts + r % kTileRows * kPanelRows;
    }
  }
  FRESHET_INLINE_MEMBER const uint8_t* operand(int i) const {
    return kPlanes == 2 ? x[0] + i * fine : x[i];
  }
};

// A panel's block times a step's tokens.
template <int kPlanes>
struct Product {
  const uint8_t* unit;
  const Tokens<kPlanes>* tokens;
  float* sums;  // of the step's tokens, so far
  int64_t panel;
  int64_t block;
  bool last;  // block of the rows
};

// Products one after the other. Storing the sums of one and scaling them falls between the tile
// instructions of the next: a tile's sums are stored just before it is used again, and scaled a few
// tokens at a time after that.
template <class F, int kPlanes>
class Pipe {
 public:
  using U = Unit<F>;
  explicit Pipe(const MatmulCall& call) : c(call) {}

  // between(k, i): after product i of k's quarter of the block.
  template <int kOperands, class Between>
  FRESHET_INLINE_MEMBER void run(const Product<kPlanes>& p, int64_t x_at, const Between& between) {
    constexpr int kSlots = 3 * kOperands * U::kBytePlanes;
    next = 0;
    chunk = (count + kSlots - 1) / kSlots;
    const uint8_t* const x[2] = {p.tokens->operand(0) + x_at, p.tokens->operand(1) + x_at};
    if (kOperands == 1 && stored_operands == 2) {
      tile_store<2>(stored + 2 * kTileInts);
      if constexpr (U::kBytePlanes == 2) tile_store<3>(stored + 3 * kTileInts);
    }
    quarter<kOperands, true>(x, p.tokens->stride, p.unit, 0, between);
    for (int k = 1; k < 4; ++k) {
      quarter<kOperands, false>(x, p.tokens->stride, p.unit, k, between);
    }
    before = p;
    count = p.tokens->count;
    stored_operands = kOperands;
  }
  template <class Between>
  FRESHET_INLINE_MEMBER void run(const Product<kPlanes>& p, int64_t x_at, const Between& between) {
    if (kPlanes == 2 || p.tokens->tiles == 2) {
      run<2>(p, x_at, between);
    } else {
      run<1>(p, x_at, between);
    }
  }
  // Scales some tokens of the product before.
  FRESHET_INLINE_MEMBER void scale_some() {
    const int from = next;
    next = from + chunk < count ? from + chunk : count;
    scale(from, next);
  }
  __attribute__((noinline)) void scale_some_apart() { scale_some(); }
  // Stores and scales what is left.
  void drain() {
    tile_store<0>(stored);
    if constexpr (U::kBytePlanes == 2) tile_store<1>(stored + kTileInts);
    tile_store<2>(stored + 2 * kTileInts);
    if constexpr (U::kBytePlanes == 2) tile_store<3>(stored + 3 * kTileInts);
    scale(0, count);
    count = 0;
  }

 private:
  template <int kTile, bool kFirst>
  FRESHET_INLINE_MEMBER void begin() {
    if constexpr (kFirst) {
      tile_store<kTile>(stored + kTile * kTileInts);
      tile_zero<kTile>();
    }
  }
  // A quarter of the block's products; x: operands of activations at its first number.
  template <int kOperands, bool kFirst, class Between>
  FRESHET_INLINE_MEMBER void quarter(const uint8_t* const (&x)[2], int64_t stride,
                                     const uint8_t* unit, int k, const Between& between) {
    tile_load<6>(unit + k * 16 * kLine, kLine);
    tile_load<4>(x[0] + k * 64, stride);
    begin<0, kFirst>();
    tile_dp_u8<0, 4, 6>();
    between(k, 0);
    if constexpr (kOperands == 2) {
      tile_load<5>(x[1] + k * 64, stride);
      begin<2, kFirst>();
      tile_dp_u8<2, 5, 6>();
      between(k, 1);
    }
    if constexpr (U::kBytePlanes == 2) {
      tile_load<7>(unit + U::kPlane + k * 16 * kLine, kLine);
      begin<1, kFirst>();
      tile_dp_i8<1, 4, 7>();
      between(k, 2);
      if constexpr (kOperands == 2) {
        begin<3, kFirst>();
        tile_dp_i8<3, 5, 7>();
        between(k, 3);
      }
    }
  }

  // A whole-number sum that is stored in `at`.
  FRESHET_INLINE I32 sum_at(const int32_t* at) {
    if constexpr (U::kBytePlanes == 1) return load_i(at);
    return add_i(load_i(at), byte_up(load_i(at + kTileInts)));
  }
  // Adds tokens [t0, t1) of the product before to its sums.
  FRESHET_INLINE_MEMBER void scale(int t0, int t1) {
    constexpr int64_t kSums =
        F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
    constexpr int kPairs = U::kPairs;
    if (t0 >= t1) return;
    const uint8_t* const unit = before.unit;
    const Tokens<kPlanes>& x = *before.tokens;
    const int64_t at = before.block * 2 * kLine;
    const F32 d = bits_f(load_i(unit + U::kDAt));
    const auto held = static_cast<__mmask16>(before.block == 0 ? 0 : 0xffff);
    for (int t = t0; t < t1; ++t) {
      const uint8_t* const record = x.records[t] + at;
      const uint8_t* const last = record + (kPlanes - 1) * kLine;
      float* const sums = before.sums + t * kPanelRows;
      I32 sum[kPlanes];
      FRESHET_UNROLL
      for (int p = 0; p < kPlanes; ++p) {  // of two planes, tokens are rows of both operands
        sum[p] = sum_at(stored + x.place[t] + p * 2 * kTileInts);
      }
      F32 acc = _mm512_maskz_loadu_ps(held, sums);
      acc = fma_f(join_planes<kPlanes>(sum), mul_f(d, set_f(f32_at(last))), acc);
      if constexpr (F::kAffine) {
        I32 offset[kPlanes];
        FRESHET_UNROLL
        for (int p = 0; p < kPlanes; ++p) {
          offset[p] = zero_i();
          FRESHET_UNROLL
          for (int i = 0; i < kPairs; ++i) {
            const I32 pair = load_i(unit + U::kPairsAt + i * kLine);
            offset[p] =
                add_madd_i(offset[p], pair, set_i(i32_at(record + p * kLine + kSums + 4 * i)));
          }
        }
        const F32 dmin = bits_f(load_i(unit + U::kDAt + kLine));
        acc = fma_f(join_planes<kPlanes>(offset), mul_f(dmin, set_f(f32_at(last + 4))), acc);
      }
      store_f(sums, acc);
    }
    if (before.last) finish_rows(t0, t1);
  }
  __attribute__((noinline)) void finish_rows(int t0, int t1) const {
    for (int t = t0; t < t1; ++t) {
      finish(c, before.panel, before.tokens->t0 + t, load_f(before.sums + t * kPanelRows));
    }
  }

  const MatmulCall& c;
  Product<kPlanes> before{};
  int count = 0;  // its tokens
  int stored_operands = 2;
  int next = 0;
  int chunk = 0;
  alignas(64) int32_t stored[4 * kTileInts];
};

// Panels and tokens that work goes on with before the next block of K: unpacked panels and sums
// stay in the L2 cache, the block's activations of a step in the L1 cache.
inline constexpr int kBlocksGroup = 16;
inline constexpr int64_t kBlocksTokens = 512;

template <class F>
struct BlocksScratch {
  alignas(64) uint8_t panels[kBlocksGroup * Unit<F>::kBytes];
  alignas(64) uint8_t rows[kCopyBytes<2, kUnitK>];
  alignas(64) float sums[kBlocksGroup * kBlocksTokens * kPanelRows];
};

// The rows, and their records, that a step's panels fetch to the L2 cache for the next step: two
// rows a panel (one, if both planes count).
template <int kPlanes>
struct Fetch {
  const uint8_t* x[2];
  const uint8_t* records[2];
  Fetch(const MatmulCall& c, int64_t fine, int64_t t, int64_t b, int64_t panel) {
    const Q8x256Layout l = q8x256_layout(c.cols);
    for (int i = 0; i < 2; ++i) {
      const int64_t wanted = t + panel * (2 / kPlanes) + (kPlanes == 2 ? 0 : i);
      const uint8_t* const row = act_row(c, wanted < c.tokens ? wanted : c.tokens - 1);
      x[i] = row + b * kUnitK + (kPlanes == 2 ? i * fine : 0);
      records[i] = row + l.records + (b * 2 + (kPlanes == 2 ? i : 0)) * kLine;
    }
  }
  FRESHET_INLINE_MEMBER void operator()(int k, int i) const {
    if (i > 1) return;
    prefetch(x[i] + k * kLine);
    if (k == 3) prefetch(records[i]);
  }
};

// Block at.b0 of a group of panels times the tokens at.t0 .. at.t1.
template <class F, int kPlanes>
void blocks_stretch(const MatmulCall& c, BlocksScratch<F>& s, Pipe<F, kPlanes>& pipe,
                    const Stretch& at) {
  const int64_t b = at.b0, panels = at.last - at.first, fine = q8x256_layout(c.cols).fine;
  for (int64_t p = 0; p < panels; ++p) {
    Unit<F>::unpack(Packed256<F>(c, at.first + p), b, s.panels + p * Unit<F>::kBytes);
  }
  Tokens<kPlanes> steps[2];  // this and the one before, whose last sums are still to be scaled
  float* sums = s.sums;
  int which = 0;
  for (int64_t t = at.t0; t < at.t1; t += steps[which].count, which ^= 1) {
    Tokens<kPlanes>& x = steps[which];
    x = Tokens<kPlanes>(c, t, at.t1 - t);
    int64_t x_at = b * kUnitK;
    if (c.rows_index != nullptr) {
      x.template gather<kPlanes, kUnitK>(c, x.fine, x_at, kUnitK, s.rows);
      x_at = 0;
    }
    const bool over = t + x.count >= at.t1 && b + 1 < at.blocks;
    for (int64_t p = 0; p < panels; ++p, sums += kMostRows / kPlanes * kPanelRows) {
      const Product<kPlanes> product{
          s.panels + p * Unit<F>::kBytes, &x, sums, at.first + p, b, b + 1 == at.blocks};
      const Fetch<kPlanes> fetch(c, fine, over ? at.t0 : t + x.count, over ? b + 1 : b, p);
      pipe.run(product, x_at, [&](int k, int i) __attribute__((always_inline)) {
        fetch(k, i);
        if (k > 0) pipe.scale_some();
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
  Pipe<F, kPlanes> pipe(c);
  Tiles tiles;
  tiles.configure(tile_height(c), kLine);
  Stretch at{};
  at.blocks = blocks_of(c.cols, kUnitK);
  const int64_t tokens = tokens_at_a_time(c.tokens, kBlocksTokens);
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += tokens) {
    at.t1 = at.t0 + tokens < c.tokens ? at.t0 + tokens : c.tokens;
    for (at.first = first; at.first < last; at.first += kBlocksGroup) {
      at.last = at.first + kBlocksGroup < last ? at.first + kBlocksGroup : last;
      for (at.b0 = 0; at.b0 < at.blocks; ++at.b0) {
        blocks_stretch<F, kPlanes>(c, s, pipe, at);
      }
    }
  }
}

// Few tokens use a block once or twice: it is unpacked to the L1 cache, between the products of the
// block before.
template <class F, int kPlanes, int kSteps>
void blocks_few(const MatmulCall& c, int64_t first, int64_t last) {
  using U = Unit<F>;
  alignas(64) uint8_t units[2][U::kBytes];
  alignas(64) float sums[kSteps][kMostRows * kPanelRows];
  Pipe<F, kPlanes> pipe(c);
  Tiles tiles;
  tiles.configure(tile_height(c), kLine);
  Tokens<kPlanes> steps[kSteps];
  int64_t t = 0;
  for (Tokens<kPlanes>& x : steps) {
    x = Tokens<kPlanes>(c, t, c.tokens - t);
    t += x.count;
  }
  const int64_t blocks = blocks_of(c.cols, kUnitK);
  U::unpack(Packed256<F>(c, first), 0, units[0]);
  int now = 0;
  for (int64_t p = first; p < last; ++p) {
    for (int64_t b = 0; b < blocks; ++b, now ^= 1) {
      const bool same = b + 1 < blocks || p + 1 == last;
      const Packed256<F> panel(c, same ? p : p + 1);
      const auto block = panel.block(b + 1 < blocks ? b + 1 : 0);
      uint8_t* const to = units[now ^ 1];
      for (int q = 0; q < kSteps; ++q) {
        const Product<kPlanes> product{units[now], &steps[q], sums[q], p, b, b + 1 == blocks};
        pipe.run(product, b * kUnitK, [&](int k, int i) __attribute__((always_inline)) {
          if (k > 0) pipe.scale_some_apart();
          if (kSteps == 2) {
            if (i == 0) U::unpack_any(block, q * 4 + k, to);
          } else {
            if (i == 0) U::unpack_any(block, k * 2, to);
            if (i == (U::kBytePlanes == 2 ? 2 : 0)) U::unpack_any(block, k * 2 + 1, to);
          }
        });
      }
      U::unpack_scales(block, to);
    }
  }
  pipe.drain();
}

// Up to so many tokens unpacking for tiles costs more than they save.
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

template <class F>
void run_blocks(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= kFewTokens) {
    kAvx512VnniKernels.run[static_cast<int>(F::kFormat)](c, first, last);
  } else if (uses_fine_plane(c.rows, c.cols)) {
    run_blocks_planes<F, 2>(c, first, last);
  } else {
    run_blocks_planes<F, 1>(c, first, last);
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

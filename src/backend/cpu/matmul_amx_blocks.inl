// Formats of blocks on tiles of bytes, with the bits of tile256(): whole-number sums are exact in
// any order, and what follows them is the same.
//
// A block of 256 is a "unit": scale times number is a whole number of 16 bits, whose low (unsigned)
// and high (signed) bytes are two operands, so that the scales of groups are inside the tiles. Two
// operands of activations (two tiles of tokens, or the two planes of one) times these two are four
// tiles of sums, which leave the tiles once a unit.
//
// INT4 groups are no products of scales: their bytes less the zero points are one operand, and the
// halves of a block, each a group, have sums of their own in the tiles.
//
// The minima of rounded Q4_K are BF16 and times sums of activations a product of their own, on
// tiles of BF16 that join the last of each 16 blocks.
//
// While tiles multiply, one F32 operation a cycle is left, and two of whole numbers: the sums of
// one unit are scaled between the products of the next.
#pragma once

#include <new>

#include "backend/cpu/matmul_amx_rounded.inl"

namespace freshet::cpu {
namespace {

inline constexpr int kMostRows = 2 * kTileRows;  // of sums in the tiles

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
      records[t] = act_row(c, t0 + t) + at;
      place[t] = place_of(row(t));
    }
  }
  static constexpr int place_of(int row) {
    return row / kTileRows * 2 * kTileInts + row % kTileRows * kPanelRows;
  }
  FRESHET_INLINE_MEMBER const uint8_t* operand(int i) const {
    return kPlanes == 2 ? x[0] + i * fine : x[i];
  }
};

// What a step's tokens multiply offsets by, close together: in their rows it lies in pages of its
// own, one a token.
struct RowSums {
  static constexpr int64_t kStride = (kOffsetTiles + 1) * kLine;
  alignas(64) uint8_t of[2][kTileRows * kStride];
  // Of the blocks up to b that are added at once.
  void read(const MatmulCall& c, const Step& x, int64_t b) {
    const int64_t lines = b % kOffsetBlocks / 4 + 1;
    const int64_t at = q8x256_layout(c.cols).sums + b / kOffsetBlocks * kOffsetTiles * kLine;
    for (int t = 0; t < x.count; ++t) {
      const int row = x.row(t);
      const uint8_t* const from = act_row(c, x.t0 + t) + at;
      uint8_t* const to = of[row / kTileRows] + row % kTileRows * kStride;
      for (int64_t i = 0; i < lines; ++i) store_i(to + i * kLine, load_i(from + i * kLine));
    }
  }
};

// Offsets of the blocks of a panel that are added at once.
inline constexpr int64_t kPanelOffsets = kOffsetTiles * kOffsetTile;

// What a block's records say of a step's tokens, close together: many panels use it.
template <class F, int kPlanes>
struct Records {
  static constexpr int kPairs = F::kAffine ? kOffsetPairs<F> : 0;
  float d[kMostRows];
  float minus_d[F::kAffine ? kMostRows : 1];
  int32_t pairs[F::kAffine ? kMostRows * kPlanes * kPairs : 1];

  FRESHET_INLINE_MEMBER void read(const Tokens<kPlanes>& x, int64_t block) {
    for (int t = 0; t < x.count; ++t) {
      const uint8_t* const record = x.records[t] + block * 2 * kLine;
      d[t] = f32_at(record + (kPlanes - 1) * kLine);
      if constexpr (F::kAffine) {
        minus_d[t] = f32_at(record + (kPlanes - 1) * kLine + 4);
        for (int p = 0; p < kPlanes; ++p) {
          std::memcpy(pairs + (t * kPlanes + p) * kPairs, record + p * kLine + kSumsAt, 4 * kPairs);
        }
      }
    }
  }
  static constexpr int64_t kSumsAt =
      F::kGroup == 32 ? offsetof(Q8x256Record, sum32) : offsetof(Q8x256Record, sum16);
};

// A panel's block times a step's tokens.
template <class F, int kPlanes>
struct Product {
  const uint8_t* unit;
  const uint8_t* scales;  // of the unit
  const Tokens<kPlanes>* tokens;
  const Records<F, kPlanes>* records;
  float* sums;  // of the step's tokens, so far
  int64_t panel;
  int64_t block;
  bool last;  // block of the rows
  // Of blocks behind which offsets are added: tiles of these, and what they are multiplied by.
  const uint8_t* offsets = nullptr;
  const RowSums* row_sums = nullptr;
};

// Products one after the other. Storing the sums of one and scaling them falls between the tile
// instructions of the next: a tile's sums are stored just before it is used again, and scaled a few
// tokens at a time after that. kOnce: units come from the L2 cache, where activations are to stay
// in the L1 cache.
template <class F, int kPlanes, bool kOnce>
class Pipe {
 public:
  using U = Unit<F>;
  static constexpr int kMost = kMostRows / kPlanes;  // tokens of a step
  static constexpr bool kTwoSums = U::kBytePlanes == 2 || U::kHalves;
  // A token's sums are scaled in few instructions.
  static constexpr bool kShort = !F::kAffine && !U::kHalves;
  // Few tokens are unpacked for in between.
  static constexpr bool kGaps = kOnce && U::kBytePlanes == 2;
  explicit Pipe(const MatmulCall& call) : c(call) {
    before.scales = reinterpret_cast<const uint8_t*>(stored);  // any: there are no tokens
  }

  // between(k, i): after product i of k's quarter of the block. Tokens of the product before are
  // scaled there but in the first quarter, in which its sums are stored.
  template <int kOperands, class Between>
  FRESHET_INLINE_MEMBER void run(const Product<F, kPlanes>& p, int64_t x_at,
                                 const Between& between) {
    const uint8_t* const x[2] = {p.tokens->operand(0) + x_at, p.tokens->operand(1) + x_at};
    const Scaling scaling(before, c.cols);
    if (kOperands == 1 && stored_operands == 2) {
      tile_store<2>(stored + 2 * kTileInts);
      if constexpr (kTwoSums) tile_store<3>(stored + 3 * kTileInts);
    }
    quarter<kOperands, 0>(x, p.tokens->stride, p.unit, scaling, between);
    if constexpr (kOffsets<F>) offsets_quarter<kOperands, 0>(p);
    quarter<kOperands, 1>(x, p.tokens->stride, p.unit, scaling, between);
    if constexpr (kOffsets<F>) offsets_quarter<kOperands, 1>(p);
    quarter<kOperands, 2>(x, p.tokens->stride, p.unit, scaling, between);
    if constexpr (kOffsets<F>) offsets_quarter<kOperands, 2>(p);
    quarter<kOperands, 3>(x, p.tokens->stride, p.unit, scaling, between);
    if constexpr (kOffsets<F>) offsets_quarter<kOperands, 3>(p);
    before = p;
    count = p.tokens->count;
    stored_operands = kOperands;
  }
  template <class Between>
  FRESHET_INLINE_MEMBER void run(const Product<F, kPlanes>& p, int64_t x_at,
                                 const Between& between) {
    if (kPlanes == 2 || p.tokens->tiles == 2) {
      run<2>(p, x_at, between);
    } else {
      run<1>(p, x_at, between);
    }
  }
  // Stores and scales what is left.
  void drain() {
    tile_store<0>(stored);
    if constexpr (kTwoSums) tile_store<1>(stored + kTileInts);
    tile_store<2>(stored + 2 * kTileInts);
    if constexpr (kTwoSums) tile_store<3>(stored + 3 * kTileInts);
    if constexpr (kOffsets<F>) store_offsets();
    scale_part(0, kMost);
    count = 0;
  }

 private:
  struct Scaling;

  template <int kTile, bool kFirst>
  FRESHET_INLINE_MEMBER void begin() {
    if constexpr (kFirst) {
      tile_store<kTile>(stored + kTile * kTileInts);
      tile_zero<kTile>();
    }
  }
  // Offsets have the tiles that a second plane's sums would have; with each quarter of a block goes
  // one tile of them.
  FRESHET_INLINE_MEMBER void store_offsets() {
    if (before.offsets == nullptr) return;
    tile_store<1>(stored + kTileInts);
    tile_store<3>(stored + 3 * kTileInts);
  }
  template <int kOperands, int k>
  FRESHET_INLINE_MEMBER void offsets_quarter(const Product<F, kPlanes>& p) {
    static_assert(kOffsetTiles == 4);
    if (k == 0) store_offsets();
    if (p.offsets == nullptr || k > p.block % kOffsetBlocks / 4) return;
    if (k == 0) {
      tile_zero<1>();
      tile_zero<3>();
    }
    load_unit<7>(p.offsets + k * kOffsetTile);
    tile_load<4>(p.row_sums->of[0] + k * kLine, RowSums::kStride);
    tile_dp_bf16<1, 4, 7>();
    if constexpr (kOperands == 2) {
      tile_load<5>(p.row_sums->of[1] + k * kLine, RowSums::kStride);
      tile_dp_bf16<3, 5, 7>();
    }
  }
  // Tokens are scaled in three quarters: after the last product of each where they are kShort, else
  // after every one, so that tiles do not wait for so much.
  template <int kOperands, int k, int i, class Between>
  FRESHET_INLINE_MEMBER void after(const Scaling& scaling, const Between& between) {
    between(k, i);
    constexpr int kProducts = kOperands * U::kBytePlanes;
    constexpr int kProduct = kOperands == 2 ? i : i / 2;  // i: 0, 2 or 0 .. 3
    if constexpr (k > 0 && (!kShort || kProduct + 1 == kProducts)) {
      constexpr int kSlots = kShort ? 3 : 3 * kProducts;
      constexpr int kSlot = kShort ? k - 1 : (k - 1) * kProducts + kProduct;
      constexpr int kFrom = kSlot * kMost / kSlots, kTo = (kSlot + 1) * kMost / kSlots;
      if (count == kMost && !before.last) {
        const Scaling now = kShort ? scaling : Scaling(before, c.cols);
        const auto scale = [&]<bool kWithOffsets>(
                               std::bool_constant<kWithOffsets>) __attribute__((always_inline)) {
          FRESHET_UNROLL
          for (int t = kFrom; t < kTo; ++t) {
            const int place = Tokens<kPlanes>::place_of(t);
            store_f(now.sums + t * kPanelRows, scaled<kWithOffsets>(now, t, place));
          }
        };
        if (kOffsets<F> && before.offsets != nullptr) {
          scale(std::bool_constant<kOffsets<F>>());
        } else {
          scale(std::false_type());
        }
      } else {
        scale_part(kFrom, kTo);
      }
    }
  }
  template <int kTile>
  FRESHET_INLINE void load_unit(const uint8_t* from) {
    if constexpr (kOnce) {
      tile_load_once<kTile>(from, kLine);
    } else {
      tile_load<kTile>(from, kLine);
    }
    if constexpr (kGaps) tile_load_gap();
  }
  template <int kTile>
  FRESHET_INLINE void load_tokens(const uint8_t* from, int64_t stride) {
    tile_load<kTile>(from, stride);
    if constexpr (kGaps) tile_load_gap();
  }
  // A product with the only plane, or the low one.
  template <int kTile, int kX>
  FRESHET_INLINE void low_product() {
    if constexpr (kRounded<F>) {
      rounded_product<F, kTile, kX>();
    } else {
      tile_dp_u8<kTile, kX, 6>();
    }
    if constexpr (kGaps) tile_product_gap();
  }
  template <int kTile, int kX>
  FRESHET_INLINE void high_product() {
    tile_dp_i8<kTile, kX, 7>();
    if constexpr (kGaps) tile_product_gap();
  }
  // A quarter of the block's products; x: operands of activations at its first number.
  template <int kOperands, int k, class Between>
  FRESHET_INLINE_MEMBER void quarter(const uint8_t* const (&x)[2], int64_t stride,
                                     const uint8_t* unit, const Scaling& scaling,
                                     const Between& between) {
    constexpr bool kFirst = k == 0;
    load_unit<6>(unit + k * 16 * kLine);
    load_tokens<4>(x[0] + k * 64, stride);
    begin<0, kFirst>();
    if constexpr (U::kHalves) {
      begin<1, kFirst>();
      tile_dp_i8<k / 2, 4, 6>();
      after<kOperands, k, 0>(scaling, between);
      if constexpr (kOperands == 2) {
        load_tokens<5>(x[1] + k * 64, stride);
        begin<2, kFirst>();
        begin<3, kFirst>();
        tile_dp_i8<2 + k / 2, 5, 6>();
        after<kOperands, k, 1>(scaling, between);
      }
      return;
    }
    low_product<0, 4>();
    after<kOperands, k, 0>(scaling, between);
    if constexpr (kOperands == 2) {
      load_tokens<5>(x[1] + k * 64, stride);
      begin<2, kFirst>();
      low_product<2, 5>();
      after<kOperands, k, 1>(scaling, between);
    }
    if constexpr (U::kBytePlanes == 2) {
      load_unit<7>(unit + U::kPlane + k * 16 * kLine);
      begin<1, kFirst>();
      high_product<1, 4>();
      after<kOperands, k, 2>(scaling, between);
      if constexpr (kOperands == 2) {
        begin<3, kFirst>();
        high_product<3, 5>();
        after<kOperands, k, 3>(scaling, between);
      }
    }
  }

  // A whole-number sum that is stored in `at`.
  FRESHET_INLINE I32 sum_at(const int32_t* at) {
    if constexpr (U::kBytePlanes == 1) return load_i(at);
    return add_i(load_i(at), byte_up(load_i(at + kTileInts)));
  }
  // What all tokens of a product share.
  struct Scaling {
    const uint8_t* scales;
    const Records<F, kPlanes>* records;
    float* sums;
    F32 d;
    __mmask16 held;  // none of the rows' first block
    bool whole;      // the block, not half of one

    FRESHET_INLINE_MEMBER Scaling(const Product<F, kPlanes>& p, int64_t cols)
        : scales(p.scales),
          records(p.records),
          sums(p.sums),
          d(bits_f(load_i(p.scales + U::kDAt))),
          held(static_cast<__mmask16>(p.block == 0 ? 0 : 0xffff)),
          whole(cols - p.block * kUnitK > kUnitK / 2) {}
  };
  // Token t's sums with the whole-number sums at `place` added, and the offsets' if they are there.
  template <bool kWithOffsets>
  FRESHET_INLINE_MEMBER F32 scaled(const Scaling& s, int t, int place) {
    constexpr int kPairs = Records<F, kPlanes>::kPairs;
    I32 sum[kPlanes];
    FRESHET_UNROLL
    for (int p = 0; p < kPlanes; ++p) {  // of two planes, tokens are rows of both operands
      sum[p] = sum_at(stored + place + p * 2 * kTileInts);
    }
    F32 acc = _mm512_maskz_loadu_ps(s.held, s.sums + t * kPanelRows);
    if constexpr (U::kHalves) {
      for (int h = 0; h < (s.whole ? 2 : 1); ++h) {
        FRESHET_UNROLL
        for (int p = 0; p < kPlanes; ++p) {
          sum[p] = load_i(stored + place + (p * 2 + h) * kTileInts);
        }
        const F32 d = bits_f(load_i(s.scales + U::kDAt + h * kLine));
        acc = fma_f(join_planes<kPlanes>(sum), mul_f(d, set_f(s.records->d[t])), acc);
      }
      return acc;
    }
    acc = fma_f(join_planes<kPlanes>(sum), mul_f(s.d, set_f(s.records->d[t])), acc);
    if constexpr (F::kAffine) {
      I32 offset[kPlanes];
      FRESHET_UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        const int32_t* const pairs = s.records->pairs + (t * kPlanes + p) * kPairs;
        offset[p] = zero_i();
        FRESHET_UNROLL
        for (int i = 0; i < kPairs; ++i) {
          const I32 pair = load_i(s.scales + i * kLine);
          offset[p] = add_madd_i(offset[p], pair, set_i(pairs[i]));
        }
      }
      const F32 dmin = bits_f(load_i(s.scales + U::kDAt + kLine));
      acc = fma_f(join_planes<kPlanes>(offset), mul_f(dmin, set_f(s.records->minus_d[t])), acc);
    }
    if constexpr (kWithOffsets) acc = add_f(acc, bits_f(load_i(stored + place + kTileInts)));
    return acc;
  }
  // Of a step that is not full, or of rows' last block: tokens [from, to) / kMost of its own.
  __attribute__((noinline)) void scale_part(int from, int to) {
    from = from * count / kMost, to = to * count / kMost;
    if (from >= to) return;
    if (kOffsets<F> && before.offsets != nullptr) {
      scale_tokens<kOffsets<F>>(from, to);
    } else {
      scale_tokens<false>(from, to);
    }
  }
  template <bool kWithOffsets>
  FRESHET_INLINE_MEMBER void scale_tokens(int from, int to) {
    const Scaling scaling(before, c.cols);
    const int* const place = before.tokens->place;
    if (!before.last) {
      for (int t = from; t < to; ++t) {
        store_f(scaling.sums + t * kPanelRows, scaled<kWithOffsets>(scaling, t, place[t]));
      }
      return;
    }
    const MatmulCall call = c;  // in registers: results could lie where c does
    const int64_t panel = before.panel, t0 = before.tokens->t0;
    for (int t = from; t < to; ++t) {
      finish(call, panel, t0 + t, scaled<kWithOffsets>(scaling, t, place[t]));
    }
  }

  const MatmulCall& c;
  Product<F, kPlanes> before{};
  int count = 0;  // its tokens
  int stored_operands = 2;
  alignas(64) int32_t stored[4 * kTileInts];
};

// Panels and tokens that work goes on with before the next block of K: unpacked panels and sums
// stay in the L2 cache, the block's activations of a step in the L1 cache.
inline constexpr int kBlocksGroup = 16;
inline constexpr int64_t kBlocksTokens = 512;

template <class F>
struct BlocksScratch {
  alignas(64) uint8_t panels[2][kBlocksGroup * Unit<F>::kBytes];  // of this block and the next
  alignas(64) uint8_t rows[kCopyBytes<2, kUnitK>];
  // Of the blocks that are added up, and of those that follow them.
  alignas(64) uint8_t offsets[2][kOffsets<F> ? kBlocksGroup * kPanelOffsets : kLine];
  RowSums row_sums;
  alignas(64) float sums[kBlocksGroup * kBlocksTokens * kPanelRows];
};

FRESHET_INLINE void put_panel_offsets(const uint8_t* main, int64_t block, int64_t blocks,
                                      uint8_t* to) {
  put_offsets(main, block, block + 1 == blocks, to + block % kOffsetBlocks / 4 * kOffsetTile);
}

// Unpacks a block of some panels, 32 numbers at a time.
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

// The rows, and their records, that a step's panels fetch to the L2 cache for the next step: two
// rows a panel (one, if both planes count).
template <int kPlanes>
struct Fetch {
  const uint8_t* x[2];
  const uint8_t* records[2];
  const uint8_t* sums[2];
  // sums_at: where what offsets want begins in a row, or 0.
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

// Block at.b0 of a group of panels times the tokens at.t0 .. at.t1; `next` is unpacked meanwhile.
template <class F, int kPlanes>
void blocks_stretch(const MatmulCall& c, BlocksScratch<F>& s, Pipe<F, kPlanes, true>& pipe,
                    const Stretch& at, Tokens<kPlanes>* steps, const uint8_t* units,
                    const uint8_t* offsets, Unpacking<F>& next) {
  const bool adds = kOffsets<F> && ends_offsets(at.b0, at.blocks);
  const int64_t b = at.b0, panels = at.last - at.first, fine = q8x256_layout(c.cols).fine;
  const int64_t products = panels * blocks_of(at.t1 - at.t0, kMostRows / kPlanes);
  const int64_t unpackings = next.left();
  int64_t due = 0;
  Records<F, kPlanes> records[2];  // this step's and, whose last sums are to be scaled, the last's
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

// The order in which few tokens go through the blocks of some panels: a group of panels uses a
// block of the activations, which the L1 cache keeps, before the next.
struct BlockWalk {
  static constexpr int64_t kGroup = 16;
  int64_t blocks, last;
  int64_t group;  // its first panel
  int64_t panel;
  int64_t block = 0;
  BlockWalk(int64_t of, int64_t first, int64_t end)
      : blocks(of), last(end), group(first), panel(first) {}
  bool over() const { return panel >= last; }
  // A call is some panels of what its thread takes one after the other: goes on behind its last.
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

// A block as it is packed, or any other after the last.
template <class F>
struct WalkedBlock {
  TilePacked<F> panel;
  decltype(panel.block(0)) view;
  WalkedBlock(const MatmulCall& c, const BlockWalk& at)
      : panel(c, at.over() ? at.last - 1 : at.panel), view(panel.block(at.over() ? 0 : at.block)) {}
};

// Few tokens use a block once or twice: it is unpacked to the L1 cache, between the products of the
// block before, whose place it takes a quarter behind the last of them.
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
  if (first >= last) return;  // a thread without panels: there is none to begin with
  if constexpr (F::kFormat == Format::kQ4_0) {
    if (!uses_fine_plane(c.rows, c.cols)) {
      return run_rounded<RoundedQ4_0, ExactEighths, ByteEighths>(c, first, last);
    }
  } else if constexpr (F::kFormat == Format::kQ4_K) {
    if (!uses_fine_plane(c.rows, c.cols)) {
      const unsigned before = flush_denormals();  // as tiles of BF16 do
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

// From Format::kQ4_0 on.
#define FRESHET_TILE_BLOCKS                                                                       \
  run_blocks<BlockQ4_0>, run_blocks<BlockQ4_1>, run_blocks<BlockQ5_0>, run_blocks<BlockQ5_1>,     \
      run_blocks<BlockQ8_0>, run_blocks<BlockQ2_K>, run_blocks<BlockQ3_K>, run_blocks<BlockQ4_K>, \
      run_blocks<BlockQ5_K>, run_blocks<BlockQ6_K>, run_blocks<BlockIQ4_NL>,                      \
      run_blocks<BlockIQ4_XS>, run_blocks<BlockMXFP4>, run_blocks<BlockInt4<128>>

}  // namespace
}  // namespace freshet::cpu

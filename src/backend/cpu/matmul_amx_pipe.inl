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
  // Little else stands between tiles' instructions: with one plane sums are scaled there, and for
  // few tokens weights unpacked.
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

}  // namespace
}  // namespace freshet::cpu

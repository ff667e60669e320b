// Block formats on byte tiles, bit-identical to tile256(): the integer sums are exact in any order,
// and the steps after them are the same.
//
// A block of 256 is unpacked to a "unit". Scale times value is a 16-bit integer; its low (unsigned)
// and high (signed) bytes are two operands, so the tiles apply the scales of the groups as well.
// Two operands of activations (two tiles of tokens, or the two planes of one) times these two give
// four tiles of sums, which are stored once per unit.
//
// INT4 groups are not multiplied by their scales: their bytes minus the zero points are one
// operand, and the two halves of a block, each a group, have separate accumulators in the tiles.
//
// The minima of rounded Q4_K are BF16. They are multiplied by the sums of activations in a separate
// GEMM on BF16 tiles, together with the last of every 16 blocks.
//
// While the tiles multiply, one F32 operation and two integer operations per cycle are free. So the
// sums of one unit are scaled between the multiplications of the next.
#pragma once

#include "backend/cpu/matmul_amx_rounded.inl"

namespace freshet::cpu {
namespace {

inline constexpr int kMostRows = 2 * kTileRows;  // rows of sums in the tiles

// The tokens of a step, and what scaling their sums needs. If both planes are used, they are the
// two operands of one tile of tokens.
template <int kPlanes>
struct Tokens : Step {
  const uint8_t* records[kMostRows];  // per token
  int place[kMostRows];               // where the token's integer sums are stored

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

// The row sums by which a step's tokens multiply offsets, copied together: in the activation rows
// they are spread over one page per token.
struct RowSums {
  static constexpr int64_t kStride = (kOffsetTiles + 1) * kLine;
  alignas(64) uint8_t of[2][kTileRows * kStride];
  // Reads the sums for the blocks up to b that are added at once.
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

// The offsets of a panel's blocks that are added at once.
inline constexpr int64_t kPanelOffsets = kOffsetTiles * kOffsetTile;

// A block's records for a step's tokens, copied together because many panels use them.
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

// A GEMM of one block of a panel with a step's tokens.
template <class F, int kPlanes>
struct Product {
  const uint8_t* unit;
  const uint8_t* scales;  // of the unit
  const Tokens<kPlanes>* tokens;
  const Records<F, kPlanes>* records;
  float* sums;  // running sums of the step's tokens
  int64_t panel;
  int64_t block;
  bool last;  // whether this is the rows' last block
  // Set for blocks at which offsets are added: tiles of offsets, and the sums they are multiplied
  // by.
  const uint8_t* offsets = nullptr;
  const RowSums* row_sums = nullptr;
};

// Runs products in sequence. The sums of one are stored and scaled between the tile instructions of
// the next: each tile is stored just before it is reused, and then scaled a few tokens at a time.
// kOnce: units are loaded from the L2 cache without evicting the activations from the L1 cache.
template <class F, int kPlanes, bool kOnce>
class Pipe {
 public:
  using U = Unit<F>;
  static constexpr int kMost = kMostRows / kPlanes;  // tokens per step
  static constexpr bool kTwoSums = U::kBytePlanes == 2 || U::kHalves;
  // Scaling one token's sums takes few instructions.
  static constexpr bool kShort = !F::kAffine && !U::kHalves;
  // Whether there is little other work between the tile instructions. (With one plane the sums are
  // scaled there; for few tokens weights are unpacked there.)
  static constexpr bool kGaps = kOnce && U::kBytePlanes == 2;
  explicit Pipe(const MatmulCall& call) : c(call) {
    before.scales = reinterpret_cast<const uint8_t*>(stored);  // any: there are no tokens
  }

  // Calls between(k, i) after multiplication i of the block's quarter k. The previous product's
  // tokens are scaled there too, except in the first quarter, in which its sums are stored.
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
  // Stores and scales the last product.
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
  // Offsets use the accumulators that a second plane would use. Each quarter of a block multiplies
  // one tile of offsets.
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
  // Scales tokens during the last three quarters: after the last multiplication of a quarter if
  // kShort, else after each one, so that the tiles wait less.
  template <int kOperands, int k, int i, class Between>
  FRESHET_INLINE_MEMBER void after(const Scaling& scaling, const Between& between) {
    between(k, i);
    constexpr int kProducts = kOperands * U::kBytePlanes;
    constexpr int kProduct = kOperands == 2 ? i : i / 2;  // i is 0 and 2, or 0 .. 3
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
  // Multiplies by the only plane, or by the low one.
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
  // Multiplies a quarter of the block. x: activation operands at the block's first value.
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

  // The integer sum stored at `at`.
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
    __mmask16 held;  // empty for the rows' first block
    bool whole;      // a full block, not half of one

    FRESHET_INLINE_MEMBER Scaling(const Product<F, kPlanes>& p, int64_t cols)
        : scales(p.scales),
          records(p.records),
          sums(p.sums),
          d(bits_f(load_i(p.scales + U::kDAt))),
          held(static_cast<__mmask16>(p.block == 0 ? 0 : 0xffff)),
          whole(cols - p.block * kUnitK > kUnitK / 2) {}
  };
  // Token t's sums plus the integer sums at `place`, and plus the offsets if there are any.
  template <bool kWithOffsets>
  FRESHET_INLINE_MEMBER F32 scaled(const Scaling& s, int t, int place) {
    constexpr int kPairs = Records<F, kPlanes>::kPairs;
    I32 sum[kPlanes];
    FRESHET_UNROLL
    for (int p = 0; p < kPlanes; ++p) {  // with two planes, tokens are rows of both operands
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
  // For a step that is not full, or the rows' last block: scales its tokens [from, to) / kMost.
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
    const MatmulCall call = c;  // keeps it in registers: results might alias c
    const int64_t panel = before.panel, t0 = before.tokens->t0;
    for (int t = from; t < to; ++t) {
      finish(call, panel, t0 + t, scaled<kWithOffsets>(scaling, t, place[t]));
    }
  }

  const MatmulCall& c;
  Product<F, kPlanes> before{};
  int count = 0;  // tokens of `before`
  int stored_operands = 2;
  alignas(64) int32_t stored[4 * kTileInts];
};

}  // namespace
}  // namespace freshet::cpu

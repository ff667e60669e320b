// GEMM with F32 weights on BF16 tiles.
//
// A weight is the sum of two BF16 values, high and low, which leaves an error below 2^-16 of it; an
// activation is the sum of its coarse and its fine plane. For each 32 k the tiles add high x
// coarse, high x fine and low x coarse, in this order; low x fine, at most 2^-16 of the product, is
// left out. An infinite weight gives NaN. Weights stay packed as F32: panels are split for a
// stretch of K at a time.
#pragma once

#include "backend/cpu/matmul_amx_depth.inl"

namespace freshet::cpu {
namespace {

inline constexpr int kNear = 2048;  // bytes that lines are prefetched to L1 ahead of their use

// The two BF16 values of 16 weights, each in the upper half of a lane.
struct SplitWeights {
  I32 high, low;
};
FRESHET_INLINE SplitWeights split_weights(I32 bits) {
  const I32 upper = set_i(static_cast<int32_t>(0xffff0000));
  const I32 high = and_i(bits, upper);
  const I32 rest = bits_i(sub_f(bits_f(bits), bits_f(high)));  // exact
  return {high, and_i(add_i(rest, set_i(0x8000)), upper)};     // nearest, ties away from zero
}

struct NumbersF32 : NumbersBase {
  using Lines = LinesF32;
  static constexpr int kPlanes = 2;
  static constexpr bool kFlush = true;
  static constexpr bool kSplit = true;
  static int64_t fine(const MatmulCall& c) { return bf16_layout(c.cols).fine; }
  template <int kTile, int kX, int kW>
  FRESHET_INLINE void multiply() {
    tile_dp_bf16<kTile, kX, kW>();
  }
  // Writes each block as a tile of high values and one of low values.
  static void split(const uint8_t* from, int64_t blocks, uint8_t* to) {
    for (int64_t b = 0; b < blocks; ++b, from += 2 * kTileBytes, to += 2 * kTileBytes) {
      FRESHET_UNROLL
      for (int i = 0; i < 16;
           ++i) {  // as in a panel of BF16: 0 and 2 of every four k, then 1 and 3
        const uint8_t* const line = from + (i / 2 * 4 + i % 2) * kLine;
        const SplitWeights even = split_weights(load_i(line));
        const SplitWeights odd = split_weights(load_i(line + 2 * kLine));
        prefetch_near(from + 2 * i * kLine + kNear);
        prefetch_near(from + (2 * i + 1) * kLine + kNear);
        store_i(to + i * kLine, or_i(shr(even.high, 16), odd.high));
        store_i(to + kTileBytes + i * kLine, or_i(shr(even.low, 16), odd.low));
      }
    }
  }
};

// A tile of up to four tokens with the bits of the tiles. Rows hold both planes, widened to F32.
struct FamilySplitF32 : FamilyBf16<LinesF32, 2> {
  using FamilyBf16::FamilyBf16;
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&x)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    for (int64_t b = b0; b < b1; ++b) {
      const uint8_t* const p = w.main(b);
      const int64_t at = (b - b0) * kRowBytes;
      F32 even[3 * T], odd[3 * T];  // of each token: high x coarse, high x fine, low x coarse
      I32 four[4];
      FRESHET_UNROLL
      for (int r = 0; r < 3 * T; ++r) even[r] = odd[r] = zero_f();
      FRESHET_UNROLL
      for (int i = 0; i < 16; ++i) {
        prefetch_lines<2>(p + i * 2 * kLine + kAhead);
        prefetch_near(p + i * 2 * kLine + kNear);
        prefetch_near(p + (i * 2 + 1) * kLine + kNear);
        if (i % 2 == 0) {  // four lines in their order, which the processor's prefetchers follow
          FRESHET_UNROLL
          for (int k = 0; k < 4; ++k) four[k] = load_i(p + (2 * i + k) * kLine);
        }
        const SplitWeights we = split_weights(four[i % 2]), wo = split_weights(four[i % 2 + 2]);
        FRESHET_UNROLL
        for (int t = 0; t < T; ++t) {
          const uint8_t* const coarse = x[t] + at + 8 * i;
          const F32 xe = set_f(f32_at(coarse)), xo = set_f(f32_at(coarse + 4));
          const F32 fe = set_f(f32_at(coarse + 128)), fo = set_f(f32_at(coarse + 132));
          even[3 * t] = fma_f(bits_f(we.high), xe, even[3 * t]);
          odd[3 * t] = fma_f(bits_f(wo.high), xo, odd[3 * t]);
          even[3 * t + 1] = fma_f(bits_f(we.high), fe, even[3 * t + 1]);
          odd[3 * t + 1] = fma_f(bits_f(wo.high), fo, odd[3 * t + 1]);
          even[3 * t + 2] = fma_f(bits_f(we.low), xe, even[3 * t + 2]);
          odd[3 * t + 2] = fma_f(bits_f(wo.low), xo, odd[3 * t + 2]);
        }
      }
      FRESHET_UNROLL
      for (int r = 0; r < 3 * T; ++r) acc[r / 3] = add_f(acc[r / 3], add_f(even[r], odd[r]));
    }
  }
};

void run_split_f32(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens > 4) return depth_many<NumbersF32>(c, first, last);
  const unsigned before = flush_denormals();
  if (c.tokens == 1) {
    run_few<FamilySplitF32, 1>(c, first, last);
  } else if (c.tokens == 2) {
    run_few<FamilySplitF32, 2>(c, first, last);
  } else {
    run_few<FamilySplitF32, 4>(c, first, last);
  }
  restore_denormals(before);
}

}  // namespace
}  // namespace freshet::cpu

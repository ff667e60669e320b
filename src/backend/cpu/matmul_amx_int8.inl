// INT8 weights on tiles: the sums of all of a row are exact, whatever stretches they come in.
#pragma once

#include "backend/cpu/matmul_amx_depth.inl"

namespace freshet::cpu {
namespace {

struct NumbersINT8 {
  using Lines = LinesINT8;
  static constexpr int kPlanes = 1;
  const int64_t record;
  explicit NumbersINT8(const MatmulCall& c) : record(int8_layout(c.cols).record) {}
  static int64_t fine(const MatmulCall&) { return 0; }
  template <int kTile, int kX, int kW>
  FRESHET_INLINE void multiply() {
    tile_dp_i8<kTile, kX, kW>();
  }
  FRESHET_INLINE_MEMBER F32 result(const MatmulCall& c, int64_t panel, int64_t t, F32 acc) const {
    return result_int8<false>(Packed<LinesINT8>(c, panel), act_row(c, t) + record, acc);
  }
};

// Up to so many tokens reading the weights is all there is to it.
inline constexpr int64_t kFewInt8Tokens = 4;

void run_int8_tiles(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= kFewInt8Tokens) {
    kAvx512VnniKernels.run[static_cast<int>(Format::kINT8)](c, first, last);
  } else {
    depth_many<NumbersINT8>(c, first, last);
  }
}

}  // namespace
}  // namespace freshet::cpu

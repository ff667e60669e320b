// GEMM with INT8 weights on tiles. The sums of a row are exact, however it is cut into stretches.
#pragma once

#include "backend/cpu/matmul_amx_depth.inl"

namespace freshet::cpu {
namespace {

struct NumbersINT8 : NumbersBase {
  using Lines = LinesINT8;
  static constexpr int kPlanes = 1;
  static constexpr bool kFlush = false;
  static int64_t fine(const MatmulCall&) { return 0; }
  template <int kTile, int kX, int kW>
  FRESHET_INLINE void multiply() {
    tile_dp_i8<kTile, kX, kW>();
  }
  struct Scales {
    float d[2 * kTileRows];  // per token of a step
    FRESHET_INLINE_MEMBER void read(const MatmulCall& c, const Step& s) {
      const int64_t record = int8_layout(c.cols).record;
      for (int t = 0; t < s.count; ++t) d[t] = f32_at(act_row(c, s.t0 + t) + record);
    }
  };
  struct Panel {
    const F32 scale;
    FRESHET_INLINE_MEMBER Panel(const MatmulCall& c, int64_t panel)
        : scale(bits_f(load_i(Packed<LinesINT8>(c, panel).tail_part))) {}
    FRESHET_INLINE_MEMBER F32 result(const Scales& tokens, int t, F32 acc) const {
      return scaled_int8(bits_i(acc), scale, tokens.d[t]);
    }
  };
};

// Up to this many tokens, reading the weights takes all the time.
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

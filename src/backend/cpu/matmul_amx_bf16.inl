// GEMM with BF16 weights on tiles.
#pragma once

#include "backend/cpu/matmul_amx_depth.inl"

namespace freshet::cpu {
namespace {

template <int planes>
struct NumbersBF16 : NumbersBase {
  using Lines = LinesBF16;
  static constexpr int kPlanes = planes;
  static constexpr bool kFlush = true;
  static int64_t fine(const MatmulCall& c) { return bf16_layout(c.cols).fine; }
  template <int kTile, int kX, int kW>
  FRESHET_INLINE void multiply() {
    tile_dp_bf16<kTile, kX, kW>();
  }
};

template <int kPlanes>
void run_bf16_planes(const MatmulCall& c, int64_t first, int64_t last) {
  if (c.tokens <= 2) return run_family<FamilyBf16<LinesBF16, kPlanes>>(c, first, last);
  depth_many<NumbersBF16<kPlanes>>(c, first, last);
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

// GEMM with quantised weights for more than kQuantFew and up to kQuantMiddle tokens (Hopper):
// selects the shape of the kernel in gemm_q_sm90_wgmma.cuh that runs a list.
//
// The kernel is limited by the instructions issued per piece rather than by bandwidth. With so few
// tokens there are registers for four warpgroups, which hide each other's latency; or for two
// warpgroups with twice as many rows each (with SwiGLU: of gate and up), which load a piece of
// activations once for both (gemm_q_sm90_wgmma.cuh).
#pragma once

#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace decode {

template <class F>
inline constexpr bool kDeep = (kDeepGroups & bit(F::kCode)) != 0;

template <class F, int NT, int kSlices, bool kAny>
int run_slices(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_decode<Shape<F, NT, Split::kLeaves, 4, kSlices / kPair, 1, kAny>>(ctx, list,
                                                                                  tokens);
}

// NT: token tiles per block. kSlices slices of K run in parallel, in clusters of two blocks.
template <class F, int NT, int kSlices>
int run_middle(const Context& ctx, const ProductList& list, int64_t tokens) {
  if constexpr (kSlices > 1) {
    const bool even = slices_are_even(F::kCode, list.of[0].weight.cols);  // K is the same for all
    return even ? run_slices<F, NT, kSlices, false>(ctx, list, tokens)
                : run_slices<F, NT, kSlices, true>(ctx, list, tokens);
  } else {
    // Four warpgroups don't have enough registers for more tokens.
    return launch_decode<Shape<F, NT, Split::kRows, NT == 4 ? 4 : 2>>(ctx, list, tokens);
  }
}

// kRows: rows of gate per tile, and as many of up.
template <class F, int NT, int kRows>
int run_middle_gated(const Context& ctx, const ProductList& gate, int64_t tokens,
                     const Activations& act) {
  // 96 and 160 rows are three and five warpgroups.
  constexpr bool kDeepRows = kRows == 128 && kDeep<F>;
  using Tile = Shape<F, NT, Split::kGate, kDeepRows ? 2 : kRows / 32, 1, kDeepRows ? 2 : 1>;
  return launch_decode<Tile>(ctx, gate, tokens, act);
}

}  // namespace decode

template <class F, int kSlices>
int run_middle(const Context& ctx, const ProductList& list, int64_t tokens) {
  return tokens <= 32 ? decode::run_middle<F, 4, kSlices>(ctx, list, tokens)
                      : decode::run_middle<F, 8, kSlices>(ctx, list, tokens);
}

template <class F>
int run_middle_deep(const Context& ctx, const ProductList& list, int64_t tokens) {
  using decode::launch_decode;
  using decode::Split;
  if constexpr (decode::kDeep<F>) {
    if (tokens > 32) {
      return launch_decode<decode::Shape<F, 8, Split::kRows, 2, 1, 2>>(ctx, list, tokens);
    }
    return launch_decode<decode::Shape<F, 4, Split::kRows, 2, 1, 2>>(ctx, list, tokens);
  } else {
    return static_cast<int>(cudaErrorInvalidValue);  // the table doesn't allow the format
  }
}

template <class F>
int run_decode_rows(const Context& ctx, const ProductList& list, int64_t tokens) {
  return decode::launch_decode<decode::Shape<F, 8, decode::Split::kRows, 2>>(ctx, list, tokens);
}

template <class F, int kRows>
int run_middle_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act) {
  ProductList gate = gate_and_up;
  gate.count = 1;  // only gate is counted; up has the same rows
  // An odd number of warpgroups doesn't have enough registers for more tokens.
  if constexpr (kRows % 64 == 0) {
    if (tokens > 32) return decode::run_middle_gated<F, 8, kRows>(ctx, gate, tokens, act);
  }
  return decode::run_middle_gated<F, 4, kRows>(ctx, gate, tokens, act);
}

#define FRESHET_MIDDLE(F)                                                       \
  template int run_middle<F, 8>(const Context&, const ProductList&, int64_t);   \
  template int run_middle<F, 4>(const Context&, const ProductList&, int64_t);   \
  template int run_middle<F, 1>(const Context&, const ProductList&, int64_t);   \
  template int run_middle_deep<F>(const Context&, const ProductList&, int64_t); \
  template int run_decode_rows<F>(const Context&, const ProductList&, int64_t); \
  FRESHET_MIDDLE_GATED(F, 64)                                                   \
  FRESHET_MIDDLE_GATED(F, 96)                                                   \
  FRESHET_MIDDLE_GATED(F, 128)                                                  \
  FRESHET_MIDDLE_GATED(F, 160)
#define FRESHET_MIDDLE_GATED(F, kRows)                                                 \
  template int run_middle_gated<F, kRows>(const Context&, const ProductList&, int64_t, \
                                          const Activations&);

}  // namespace freshet::cuda

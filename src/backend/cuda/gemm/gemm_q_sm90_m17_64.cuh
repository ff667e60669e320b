// Products of quantised weights with more than kQuantFew and up to kQuantMiddle tokens on Hopper.
//
// What a warp has to issue for a piece decides, more than what it reads: with so few tokens there
// are the registers for four warpgroups, which hide each other's latencies, or for the sums of
// twice as many rows (of gate and up: of both) in each of two, which issue what a piece of tokens
// takes once for both (gemm_q_sm90_wgmma.cuh).
#pragma once

#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace decode {

template <class F>
inline constexpr bool kDeep = (kDeepGroups & bit(F::kCode)) != 0;

// NT: tiles of tokens of a block. K in so many slices that run at once.
template <class F, int NT, int kSlices>
int run_middle(const Context& ctx, const ProductList& list, int64_t tokens) {
  constexpr Split kLeaves = Split::kLeaves;
  if constexpr (kSlices == 8) {
    return launch_decode<Shape<F, NT, kLeaves, 4, 4>>(ctx, list, tokens);
  } else if constexpr (kSlices == 4) {
    return launch_decode<Shape<F, NT, kLeaves, 4, 2>>(ctx, list, tokens);
  } else if constexpr (kSlices == 2) {
    return launch_decode<Shape<F, NT, kLeaves, 1>>(ctx, list, tokens);
  } else {
    // There are no registers for the sums of more tokens in four warpgroups.
    return launch_decode<Shape<F, NT, Split::kRows, NT == 4 ? 4 : 2>>(ctx, list, tokens);
  }
}

template <class F, int NT>
int run_middle_gated(const Context& ctx, const ProductList& gate, int64_t tokens,
                     const Activations& act, bool large) {
  using Large = Shape<F, NT, Split::kGate, kDeep<F> ? 2 : 4, 1, kDeep<F> ? 2 : 1>;
  return large ? launch_decode<Large>(ctx, gate, tokens, act)
               : launch_decode<Shape<F, NT, Split::kGate, 2>>(ctx, gate, tokens, act);
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
    return static_cast<int>(cudaErrorInvalidValue);  // the table does not name the format
  }
}

template <class F>
int run_decode_rows(const Context& ctx, const ProductList& list, int64_t tokens) {
  return decode::launch_decode<decode::Shape<F, 8, decode::Split::kRows, 2>>(ctx, list, tokens);
}

template <class F>
int run_middle_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act, bool large) {
  ProductList gate = gate_and_up;
  gate.count = 1;  // up's rows stand beside gate's
  return tokens <= 32 ? decode::run_middle_gated<F, 4>(ctx, gate, tokens, act, large)
                      : decode::run_middle_gated<F, 8>(ctx, gate, tokens, act, large);
}

#define FRESHET_MIDDLE(F)                                                       \
  template int run_middle<F, 8>(const Context&, const ProductList&, int64_t);   \
  template int run_middle<F, 4>(const Context&, const ProductList&, int64_t);   \
  template int run_middle<F, 2>(const Context&, const ProductList&, int64_t);   \
  template int run_middle<F, 1>(const Context&, const ProductList&, int64_t);   \
  template int run_middle_deep<F>(const Context&, const ProductList&, int64_t); \
  template int run_decode_rows<F>(const Context&, const ProductList&, int64_t); \
  template int run_middle_gated<F>(const Context&, const ProductList&, int64_t, \
                                   const Activations&, bool);

}  // namespace freshet::cuda

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

// Of these formats two warpgroups that have twice 64 rows are faster than four.
template <class F>
inline constexpr bool kBoth = F::kCode == Code::kQ4_0 || F::kCode == Code::kQ4_K ||
                              F::kCode == Code::kQ8_0 || F::kCode == Code::kQ4_1;

template <class F, int NT>
int run_middle(const Context& ctx, const ProductList& list, int64_t tokens) {
  constexpr Split kRows = Split::kRows, kLeaves = Split::kLeaves;
  const int64_t cols = list.of[0].weight.cols;  // all have as many
  const int parts = leaves(cols);
  const bool even = cols % (parts * F::kUnit) == 0;  // leaves of one size
  const auto fit = [&](int64_t rows) {
    return tiles_of<NT>(list, tokens, rows) * kPair <= ctx.multiprocessors;
  };
  if (even && parts == kMostLeaves && fit(64)) {
    return launch_decode<Shape<F, NT, kLeaves, 4, 4>>(ctx, list, tokens);
  }
  if (even && parts >= 4 && fit(128)) {
    return launch_decode<Shape<F, NT, kLeaves, 4, 2>>(ctx, list, tokens);
  }
  if (parts == kMostLeaves && pairs_fit<NT>(ctx, list, tokens)) {
    return launch_decode<Shape<F, NT, kLeaves, 1>>(ctx, list, tokens);
  }
  if constexpr (kBoth<F>) {
    if (tiles_of<NT>(list, tokens, 256) > ctx.multiprocessors) {
      return launch_decode<Shape<F, NT, kRows, 2, 1, 2>>(ctx, list, tokens);
    }
  }
  // Of more tokens' sums there is no room for four warpgroups' here.
  return launch_decode<Shape<F, NT, kRows, NT == 4 ? 4 : 2>>(ctx, list, tokens);
}

// NT: tiles of tokens of a block.
template <class F, int NT>
int run_middle_gated(const Context& ctx, const ProductList& gate, int64_t tokens,
                     const Activations& act) {
  using Wide = Shape<F, NT, Split::kGate, kBoth<F> ? 2 : 4, 1, kBoth<F> ? 2 : 1>;
  return 2 * tiles_of<NT>(gate, tokens, 128) > ctx.multiprocessors
             ? launch_decode<Wide>(ctx, gate, tokens, act)
             : launch_decode<Shape<F, NT, Split::kGate, 2>>(ctx, gate, tokens, act);
}

}  // namespace decode

template <class F>
int run_decode_middle(const Context& ctx, const ProductList& list, int64_t tokens) {
  return tokens <= 32 ? decode::run_middle<F, 4>(ctx, list, tokens)
                      : decode::run_middle<F, 8>(ctx, list, tokens);
}

template <class F>
int run_decode_rows(const Context& ctx, const ProductList& list, int64_t tokens) {
  return decode::launch_decode<decode::Shape<F, 8, decode::Split::kRows, 2>>(ctx, list, tokens);
}

template <class F>
int run_decode_middle_gated(const Context& ctx, const ProductList& gate, int64_t tokens,
                            const Activations& act) {
  return tokens <= 32 ? decode::run_middle_gated<F, 4>(ctx, gate, tokens, act)
                      : decode::run_middle_gated<F, 8>(ctx, gate, tokens, act);
}

#define FRESHET_MIDDLE(F)                                                              \
  template int run_decode_middle<F>(const Context&, const ProductList&, int64_t);      \
  template int run_decode_rows<F>(const Context&, const ProductList&, int64_t);        \
  template int run_decode_middle_gated<F>(const Context&, const ProductList&, int64_t, \
                                          const Activations&);

}  // namespace freshet::cuda

// GEMM of quantised weights with more than kQuantFew and up to kQuantMiddle tokens on Hopper: which
// shape of the kernel in gemm_q_sm90_wgmma.cuh takes a list.
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

template <class F, int NT, bool kAny>
int run_leaves(const ProductList& list, int64_t tokens, int64_t rows) {
  return rows == 64 ? launch_decode<Shape<F, NT, Split::kLeaves, 4, 4, 1, kAny>>(list, tokens)
                    : launch_decode<Shape<F, NT, Split::kLeaves, 4, 2, 1, kAny>>(list, tokens);
}

// Clusters of two blocks split K as long as they take at most two waves; blocks that walk all of K
// have twice as many rows.
template <class F, int NT>
int run_middle(const ProductList& list, int64_t tokens) {
  const int64_t cols = list.of[0].weight.cols;  // all have as many
  const int parts = leaves(cols);
  const auto waves = [&](int64_t rows) {
    return ceil_div(tiles_of<NT>(list, tokens, rows) * kPair, multiprocessors);
  };
  const int64_t rows = parts == kMostLeaves && waves(64) <= 1 ? 64 : 128;
  if (parts >= 4 && waves(rows) <= 2) {
    const bool even = cols % (parts * F::kUnit) == 0;  // leaves of one size
    return even ? run_leaves<F, NT, false>(list, tokens, rows)
                : run_leaves<F, NT, true>(list, tokens, rows);
  }
  if constexpr (kBoth<F>) {
    if (tiles_of<NT>(list, tokens, 256) > multiprocessors) {
      return launch_decode<Shape<F, NT, Split::kRows, 2, 1, 2>>(list, tokens);
    }
  }
  // Of more tokens' sums there is no room for four warpgroups' here.
  return launch_decode<Shape<F, NT, Split::kRows, NT == 4 ? 4 : 2>>(list, tokens);
}

// The number of rows of a SwiGLU tile, in order of preference, that gives the busiest SM the fewest
// rows. 96 and 160 rows are three and five warpgroups.
template <int NT>
int64_t gate_rows(const ProductList& gate, int64_t tokens) {
  int64_t best = 0, least = INT64_MAX;
  for (const int64_t rows : {128, 64, 96, 160}) {
    if (NT > 4 && rows % 64 != 0) continue;  // no registers for the sums of more tokens
    const int64_t waves = ceil_div(tiles_of<NT>(gate, tokens, rows), multiprocessors);
    if (waves * rows < least) {
      best = rows;
      least = waves * rows;
    }
  }
  return best;
}

// NT: tiles of tokens of a block.
template <class F, int NT>
int run_middle_gated(const ProductList& gate, int64_t tokens, const Activations& act) {
  constexpr Split kGate = Split::kGate;
  using Wide = Shape<F, NT, kGate, kBoth<F> ? 2 : 4, 1, kBoth<F> ? 2 : 1>;
  const int64_t rows = gate_rows<NT>(gate, tokens);
  if (rows == 64) return launch_decode<Shape<F, NT, kGate, 2>>(gate, tokens, act);
  if constexpr (NT == 4) {
    if (rows == 96) return launch_decode<Shape<F, NT, kGate, 3>>(gate, tokens, act);
    if (rows == 160) return launch_decode<Shape<F, NT, kGate, 5>>(gate, tokens, act);
  }
  return launch_decode<Wide>(gate, tokens, act);
}

}  // namespace decode

template <class F>
int run_decode_middle(const ProductList& list, int64_t tokens) {
  return tokens <= 32 ? decode::run_middle<F, 4>(list, tokens)
                      : decode::run_middle<F, 8>(list, tokens);
}

template <class F>
int run_decode_rows(const ProductList& list, int64_t tokens) {
  return decode::launch_decode<decode::Shape<F, 8, decode::Split::kRows, 2>>(list, tokens);
}

template <class F>
int run_decode_middle_gated(const ProductList& gate, int64_t tokens, const Activations& act) {
  return tokens <= 32 ? decode::run_middle_gated<F, 4>(gate, tokens, act)
                      : decode::run_middle_gated<F, 8>(gate, tokens, act);
}

#define FRESHET_MIDDLE(F)                                         \
  template int run_decode_middle<F>(const ProductList&, int64_t); \
  template int run_decode_rows<F>(const ProductList&, int64_t);   \
  template int run_decode_middle_gated<F>(const ProductList&, int64_t, const Activations&);

}  // namespace freshet::cuda

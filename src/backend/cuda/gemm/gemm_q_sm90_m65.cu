// GEMM with quantised weights for more than kQuantMiddle tokens (Hopper): two consumer warpgroups,
// the most that have enough registers for their sums (gemm_q_sm90_wgmma.cuh).
#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTiles = 16;  // token tiles
template <class F, decode::Split split, int kParts = 1, bool kAny = false>
using Shape = decode::Shape<F, kTiles, split, 2, kParts, 1, kAny>;

}  // namespace

// Clusters of two blocks split K.
template <class F>
int run_decode_split(const Context& ctx, const ProductList& list, int64_t tokens) {
  constexpr decode::Split kLeaves = decode::Split::kLeaves;
  return slices_are_even(F::kCode, list.of[0].weight.cols)
             ? decode::launch_decode<Shape<F, kLeaves, 2>>(ctx, list, tokens)
             : decode::launch_decode<Shape<F, kLeaves, 2, true>>(ctx, list, tokens);
}

template <class F>
int run_decode(const Context& ctx, const ProductList& list, int64_t tokens) {
  return decode::launch_decode<Shape<F, decode::Split::kRows>>(ctx, list, tokens);
}

template <class F>
int run_decode_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act) {
  ProductList gate = gate_and_up;
  gate.count = 1;  // only gate is counted; up has the same rows
  return decode::launch_decode<Shape<F, decode::Split::kGate>>(ctx, gate, tokens, act);
}

#define FRESHET_DECODE(F)                                                        \
  template int run_decode_split<F>(const Context&, const ProductList&, int64_t); \
  template int run_decode<F>(const Context&, const ProductList&, int64_t);       \
  template int run_decode_gated<F>(const Context&, const ProductList&, int64_t, const Activations&);
FRESHET_DECODE(Q8_0)
FRESHET_DECODE(Q4_0)
FRESHET_DECODE(Q4_K)
FRESHET_DECODE(Q6_K)
FRESHET_DECODE(MXFP4)
FRESHET_DECODE(Int4G128)
FRESHET_DECODE(Int4G32)
FRESHET_DECODE(Q5_K)
FRESHET_DECODE(Q3_K)
FRESHET_DECODE(IQ4_XS)
FRESHET_DECODE(Q5_0)
FRESHET_DECODE(Q4_1)
FRESHET_DECODE(IQ4_NL)
FRESHET_DECODE(Q5_1)
FRESHET_DECODE(Q2_K)
#undef FRESHET_DECODE

}  // namespace freshet::cuda

// Products of quantised weights with more than kQuantMiddle tokens on Hopper: two warpgroups, for
// whose sums there are the registers (gemm_q_sm90_wgmma.cuh).
#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTiles = 16;  // of 8 tokens
template <class F, decode::Split split, int kParts = 1, bool kAny = false>
using Shape = decode::Shape<F, kTiles, split, 2, kParts, 1, kAny>;

// Pairs of blocks share K.
template <class F>
int run_leaves(const ProductList& list, int64_t tokens) {
  const int64_t cols = list.of[0].weight.cols;
  constexpr decode::Split kLeaves = decode::Split::kLeaves;
  return cols % (leaves(cols) * F::kUnit) == 0  // leaves of one size
             ? decode::launch_decode<Shape<F, kLeaves, 2>>(list, tokens)
             : decode::launch_decode<Shape<F, kLeaves, 2, true>>(list, tokens);
}

}  // namespace

template <class F>
int run_decode(const ProductList& list, int64_t tokens) {
  if (tokens <= kQuantMiddle) return run_decode_middle<F>(list, tokens);
  const int64_t cols = list.of[0].weight.cols;  // all have as many
  const int64_t pairs = decode::tiles_of<kTiles>(list, tokens, 64) * decode::kPair;
  const bool shared = leaves(cols) >= 4;
  if (shared && pairs <= multiprocessors) return run_leaves<F>(list, tokens);
  // Blocks of half as many tokens, rather than few or two waves of them.
  if (2 * decode::tiles_of<kTiles>(list, tokens, 128) <= multiprocessors) {
    return run_decode_rows<F>(list, tokens);
  }
  if (shared && pairs <= 2 * multiprocessors) return run_leaves<F>(list, tokens);
  return decode::launch_decode<Shape<F, decode::Split::kRows>>(list, tokens);
}

bool decode_gated_fits(int64_t rows, int64_t tokens) {
  ProductList both = {};
  both.count = 2;
  both.of[0].weight.rows = both.of[1].weight.rows = rows;
  return rows % 64 == 0 && !(tokens <= kQuantMiddle ? decode::pairs_fit<8>(both, tokens)
                                                    : decode::pairs_fit<kTiles>(both, tokens));
}

template <class F>
int run_decode_gated(const ProductList& gate_and_up, int64_t tokens, const Activations& act) {
  ProductList gate = gate_and_up;
  gate.count = 1;  // up's rows stand beside gate's
  if (tokens <= kQuantMiddle) return run_decode_middle_gated<F>(gate, tokens, act);
  return decode::launch_decode<Shape<F, decode::Split::kGate>>(gate, tokens, act);
}

#define FRESHET_DECODE(F)                                  \
  template int run_decode<F>(const ProductList&, int64_t); \
  template int run_decode_gated<F>(const ProductList&, int64_t, const Activations&);
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

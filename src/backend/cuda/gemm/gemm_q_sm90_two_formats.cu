// Products in Q4_K or Q5_K and, behind them, in Q6_K as one launch on Hopper: queries, keys and
// values of models that keep some layers' values in more bits. The bits are those of each alone.
#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace {

using decode::kPair;
using decode::launch_decode;
using decode::Split;

template <class F, int NT, int kParts>
using ByLeaves = decode::Shape<F, NT, Split::kLeaves, 4, kParts>;
template <class F>
using ByRows = decode::Shape<F, 8, Split::kRows, 2>;

// Pairs of blocks have a tile each: of 128 rows, and of 64 of what takes longer to decode.
bool leaves_fit(const Context& ctx, const ProductList& list, int64_t tokens) {
  const int64_t cols = list.of[0].weight.cols;
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) {
    const WeightView& w = list.of[i].weight;
    tiles += ceil_div(w.rows, w.code == Code::kQ6_K ? 64 : 128);
  }
  return tokens <= kQuantMiddle && leaves(cols) == decode::kMostLeaves &&
         cols % (leaves(cols) * Q4_K::kUnit) == 0 && tiles * kPair <= ctx.multiprocessors;
}
bool rows_fit(const Context& ctx, const ProductList& list, int64_t tokens) {
  return tokens > kQuantMiddle && decode::tiles_of<8>(list, tokens, 128) <= ctx.multiprocessors;
}

template <class F>
bool takes(const Context& ctx, const ProductList& list, int other, int64_t tokens) {
  if (tokens <= kTokenTile) return once_takes_pair<F>(ctx, list, other);
  if (tokens <= kQuantFew) return few_takes(ctx, list, tokens) && !quant_wide_fits(ctx, list);
  return leaves_fit(ctx, list, tokens) || rows_fit(ctx, list, tokens);
}

template <class F>
int run(const Context& ctx, const ProductList& list, int64_t tokens) {
  if (tokens <= kTokenTile) return run_once_pair<F>(ctx, list, tokens);
  if (tokens <= kQuantFew) return run_quant_few_pair<F>(ctx, list, tokens);
  if (tokens <= 32)
    return launch_decode<ByLeaves<F, 4, 2>, ByLeaves<Q6_K, 4, 4>>(ctx, list, tokens);
  if (tokens <= kQuantMiddle) {
    return launch_decode<ByLeaves<F, 8, 2>, ByLeaves<Q6_K, 8, 4>>(ctx, list, tokens);
  }
  return launch_decode<ByRows<F>, ByRows<Q6_K>>(ctx, list, tokens);
}

}  // namespace

bool pair_takes(const Context& ctx, const ProductList& list, int64_t tokens) {
  const Code first = list.of[0].weight.code;
  if (ctx.capability != 90 || !pair_begins(first)) return false;
  int other = 1;
  while (other < list.count && list.of[other].weight.code == first) ++other;
  if (other == list.count) return false;
  return first == Code::kQ4_K ? takes<Q4_K>(ctx, list, other, tokens)
                              : takes<Q5_K>(ctx, list, other, tokens);
}

int run_pair(const Context& ctx, const ProductList& list, int64_t tokens) {
  return list.of[0].weight.code == Code::kQ4_K ? run<Q4_K>(ctx, list, tokens)
                                               : run<Q5_K>(ctx, list, tokens);
}

}  // namespace freshet::cuda

// Products in Q4_K or Q5_K and, behind them, in Q6_K as one launch on Hopper: queries, keys and
// values of models that keep some layers' values in more bits. The bits are those of each alone.
#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace {

using decode::kPair;
using decode::launch_decode;
using decode::Split;

template <class F, int NT, int kParts, bool kAny = true>
using ByLeaves = decode::Shape<F, NT, Split::kLeaves, 4, kParts, 1, kAny>;
template <class F>
using ByRows = decode::Shape<F, 8, Split::kRows, 2>;

// Clusters of two blocks take a tile each, in one wave: 128 rows, and of Q6_K, which takes longer
// to decode, 64 if there are enough SMs.
bool leaves_fit(const ProductList& list, int64_t tokens, int64_t rows_of_other) {
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) {
    const WeightView& w = list.of[i].weight;
    tiles += ceil_div(w.rows, w.code == Code::kQ6_K ? rows_of_other : 128);
  }
  return tokens <= kQuantMiddle && leaves(list.of[0].weight.cols) == decode::kMostLeaves &&
         tiles * kPair <= multiprocessors;
}
bool rows_fit(const ProductList& list, int64_t tokens) {
  return tokens > kQuantMiddle && decode::tiles_of<8>(list, tokens, 128) <= multiprocessors;
}

template <class F>
bool takes(const ProductList& list, int other, int64_t tokens) {
  if (tokens <= kTokenTile) return once_takes_pair<F>(list, other);
  if (tokens <= kQuantFew) return few_takes(list, tokens) && !quant_wide_fits(list);
  return leaves_fit(list, tokens, 128) || rows_fit(list, tokens);
}

template <class F, int NT>
int run_leaves(const ProductList& list, int64_t tokens) {
  const int64_t cols = list.of[0].weight.cols;
  if (!leaves_fit(list, tokens, 64)) {
    return launch_decode<ByLeaves<F, NT, 2>, ByLeaves<Q6_K, NT, 2>>(list, tokens);
  }
  if (cols % (leaves(cols) * F::kUnit) == 0) {  // leaves of one size
    return launch_decode<ByLeaves<F, NT, 2, false>, ByLeaves<Q6_K, NT, 4, false>>(list, tokens);
  }
  return launch_decode<ByLeaves<F, NT, 2>, ByLeaves<Q6_K, NT, 4>>(list, tokens);
}

template <class F>
int run(const ProductList& list, int64_t tokens) {
  if (tokens <= kTokenTile) return run_once_pair<F>(list, tokens);
  if (tokens <= kQuantFew) return run_quant_few_pair<F>(list, tokens);
  if (tokens <= 32) return run_leaves<F, 4>(list, tokens);
  if (tokens <= kQuantMiddle) return run_leaves<F, 8>(list, tokens);
  return launch_decode<ByRows<F>, ByRows<Q6_K>>(list, tokens);
}

}  // namespace

bool pair_takes(const ProductList& list, int64_t tokens) {
  const Code first = list.of[0].weight.code;
  if (capability != 90 || !pair_begins(first)) return false;
  int other = 1;
  while (other < list.count && list.of[other].weight.code == first) ++other;
  if (other == list.count) return false;
  return first == Code::kQ4_K ? takes<Q4_K>(list, other, tokens) : takes<Q5_K>(list, other, tokens);
}

int run_pair(const ProductList& list, int64_t tokens) {
  return list.of[0].weight.code == Code::kQ4_K ? run<Q4_K>(list, tokens) : run<Q5_K>(list, tokens);
}

}  // namespace freshet::cuda

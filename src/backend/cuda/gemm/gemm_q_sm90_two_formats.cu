// GEMMs in Q4_K or Q5_K followed by Q6_K, as one launch (Hopper): queries, keys and values of
// models that store the values of some layers with more bits. Bit-identical to separate launches.
#include "backend/cuda/gemm/gemm_q_sm90_two_formats.h"
#include "backend/cuda/gemm/gemm_q_sm90_wgmma.cuh"

namespace freshet::cuda {
namespace {

using decode::launch_decode;
using decode::Split;

template <class F, int NT, int kParts, bool kAny = true>
using BySlices = decode::Shape<F, NT, Split::kLeaves, 4, kParts, 1, kAny>;
template <class F>
using ByRows = decode::Shape<F, 8, Split::kRows, 2>;

template <class F, int NT>
int run_slices(const Context& ctx, const ProductList& list, int64_t tokens) {
  if (!pair_fits_one_wave(ctx, problem_of(list, tokens), 64)) {
    return launch_decode<BySlices<F, NT, 2>, BySlices<Q6_K, NT, 2>>(ctx, list, tokens);
  }
  if (slices_are_even(F::kCode, list.of[0].weight.cols)) {
    return launch_decode<BySlices<F, NT, 2, false>, BySlices<Q6_K, NT, 4, false>>(ctx, list,
                                                                                  tokens);
  }
  return launch_decode<BySlices<F, NT, 2>, BySlices<Q6_K, NT, 4>>(ctx, list, tokens);
}

template <class F>
int run_middle_pair(const Context& ctx, const ProductList& list, int64_t tokens) {
  return tokens <= 32 ? run_slices<F, 4>(ctx, list, tokens) : run_slices<F, 8>(ctx, list, tokens);
}

}  // namespace

// Clusters of two blocks take a tile each: 128 rows, but 64 rows of Q6_K, which takes longer to
// decode, if there are enough SMs.
int run_pair_middle(const Context& ctx, const ProductList& list, int64_t tokens) {
  return list.of[0].weight.code == Code::kQ4_K ? run_middle_pair<Q4_K>(ctx, list, tokens)
                                               : run_middle_pair<Q5_K>(ctx, list, tokens);
}

int run_pair_many(const Context& ctx, const ProductList& list, int64_t tokens) {
  return list.of[0].weight.code == Code::kQ4_K
             ? launch_decode<ByRows<Q4_K>, ByRows<Q6_K>>(ctx, list, tokens)
             : launch_decode<ByRows<Q5_K>, ByRows<Q6_K>>(ctx, list, tokens);
}

}  // namespace freshet::cuda

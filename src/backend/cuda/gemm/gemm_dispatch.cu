// The only place that chooses and launches GEMMs: cuts lists into problems, looks up a row for each
// in the tables of gemm_rows.h, and launches it.
#include <cstdio>

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_f32.cuh"
#include "backend/cuda/gemm/gemm_f32_bf16x3.cuh"
#include "backend/cuda/gemm/gemm_fp8_sm90.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

using Launch = int (*)(const Context& ctx, const ProductList& list, int64_t tokens);
using LaunchGated = int (*)(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                            const Activations& act);

// Calls body(format) if the mask contains the code. The tables allow no other code.
template <uint64_t kFormats, class Body>
int with_formats(Code code, const Body& body) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_format(code, [&](auto f) {
    if constexpr ((kFormats & bit(decltype(f)::kCode)) != 0) error = body(f);
  });
  return error;
}

// Turns a launcher that is a template of the format into a function of lists.
#define FRESHET_RUN(name, formats, launcher)                              \
  int name(const Context& ctx, const ProductList& list, int64_t tokens) { \
    return with_formats<formats>(list.of[0].weight.code, [&](auto f) {    \
      using F = decltype(f);                                              \
      return launcher(ctx, list, tokens);                                 \
    });                                                                   \
  }
#define FRESHET_RUN_GATED(name, formats, launcher)                                                \
  int name(const Context& ctx, const ProductList& list, int64_t tokens, const Activations& act) { \
    return with_formats<formats>(list.of[0].weight.code, [&](auto f) {                            \
      using F = decltype(f);                                                                      \
      return launcher(ctx, list, tokens, act);                                                    \
    });                                                                                           \
  }

constexpr uint64_t kPairs = bit(Code::kQ4_K) | bit(Code::kQ5_K);
constexpr uint64_t kTileFormats =
    kBlockFormats | bit(Code::kF16) | bit(Code::kBF16) | bit(Code::kFP8);

FRESHET_RUN(pair_m1_8, kPairs, run_once_pair<F>)
FRESHET_RUN(pair_m9_16, kPairs, run_quant_few_pair<F>)
FRESHET_RUN(q_m1_8_small_n, kBlockFormats, run_once<F>)
FRESHET_RUN(q_m1_8_long_k, kBlockFormats, run_long<F>)
FRESHET_RUN(q_m1_8_large_n, kManyWarps, run_many_rows<F>)
FRESHET_RUN(q_m1_8, kBlockFormats, run_stream<F>)
FRESHET_RUN(q_m9_16_large_n, kBlockFormats, run_quant_wide<F>)
FRESHET_RUN(q_m9_16, kBlockFormats, run_quant_few<F>)
FRESHET_RUN(q_m17_64_splitk8, kBlockFormats, (run_middle<F, 8>))
FRESHET_RUN(q_m17_64_splitk4, kBlockFormats, (run_middle<F, 4>))
FRESHET_RUN(q_m17_64_large_n, kDeepGroups, run_middle_deep<F>)
FRESHET_RUN(q_m17_64, kBlockFormats, (run_middle<F, 1>))
FRESHET_RUN(q_m65_splitk4, kBlockFormats, run_decode_split<F>)
FRESHET_RUN(q_m65_half_tokens, kBlockFormats, run_decode_rows<F>)
FRESHET_RUN(q_m65, kBlockFormats, run_decode<F>)
FRESHET_RUN(large_m, kTileFormats, run_tiles<F>)

FRESHET_RUN_GATED(swiglu_m1_8_large_n, kManyWarps, run_quant_gate<F>)
FRESHET_RUN_GATED(swiglu_m1_8, kTwoTiles, run_stream_gated<F>)
FRESHET_RUN_GATED(swiglu_m9_16, kBlockFormats, run_quant_wide_gated<F>)
FRESHET_RUN_GATED(swiglu_m17_64_large_n, kBlockFormats, (run_middle_gated<F, 128>))
FRESHET_RUN_GATED(swiglu_m17_32_rows160, kBlockFormats, (run_middle_gated<F, 160>))
FRESHET_RUN_GATED(swiglu_m17_32_rows96, kBlockFormats, (run_middle_gated<F, 96>))
FRESHET_RUN_GATED(swiglu_m17_64, kBlockFormats, (run_middle_gated<F, 64>))
FRESHET_RUN_GATED(swiglu_m65, kBlockFormats, run_decode_gated<F>)

int exact(const Context& ctx, const ProductList& list, int64_t tokens) {
  return run_exact(ctx, list.of[0], tokens);
}
int exact_many(const Context& ctx, const ProductList& list, int64_t tokens) {
  return run_exact_many(ctx, list.of[0], tokens);
}

// Launchers, in the order of the tables.
template <class R>
struct LaunchOf {
  int kernel;
  R run;
};
constexpr LaunchOf<Launch> kRuns[] = {
    {kGemmPairM1_8, pair_m1_8},
    {kGemmPairM9_16, pair_m9_16},
    {kGemmPairM17_64, run_pair_middle},
    {kGemmPairM65, run_pair_many},
    {kGemmQM1_8SmallN, q_m1_8_small_n},
    {kGemmQM1_8LongK, q_m1_8_long_k},
    {kGemmQM1_8LargeN, q_m1_8_large_n},
    {kGemmQM1_8, q_m1_8},
    {kGemmQM9_16LargeN, q_m9_16_large_n},
    {kGemmQM9_16, q_m9_16},
    {kGemmQM17_64SplitK8, q_m17_64_splitk8},
    {kGemmQM17_64SplitK4, q_m17_64_splitk4},
    {kGemmQM17_64LargeN, q_m17_64_large_n},
    {kGemmQM17_64, q_m17_64},
    {kGemmQM65SplitK4, q_m65_splitk4},
    {kGemmQM65HalfTokens, q_m65_half_tokens},
    {kGemmQM65, q_m65},
    {kGemmBf16M1_32, run_few},
    {kGemmBf16M33_128SplitK2, run_halves},
    {kGemmBf16M33_128Balanced, run_share},
    {kGemmBf16M33, run_wgmma},
    {kGemmFp8M65_128SplitK2, run_fp8_halves},
    {kGemmFp8M1_64LargeN, run_fp8_wide},
    {kGemmFp8M1_128, run_fp8_few},
    {kGemmFp8M65, run_fp8_many},
    {kGemmInt8M1_32, run_int8_few},
    {kGemmInt8M33, run_int8_many},
    {kGemmInt8Sm80, run_int8},
    {kGemmBf16x3M513, exact_many},
    {kGemmBf16x3, exact},
    {kGemmF32M9_512, run_f32_squares},
    {kGemmF32M513, run_f32_many},
    {kGemmF32, run_f32},
    {kGemmSm80SmallM, run_small_m},
    {kGemmSm80LargeM, large_m},
};
constexpr LaunchOf<LaunchGated> kGatedRuns[] = {
    {kSwigluQM1_8LargeN, swiglu_m1_8_large_n},
    {kSwigluQM1_8, swiglu_m1_8},
    {kSwigluQM9_16, swiglu_m9_16},
    {kSwigluQM17_64LargeN, swiglu_m17_64_large_n},
    {kSwigluQM17_32Rows160, swiglu_m17_32_rows160},
    {kSwigluQM17_32Rows96, swiglu_m17_32_rows96},
    {kSwigluQM17_64, swiglu_m17_64},
    {kSwigluQM65, swiglu_m65},
    {kSwigluBf16M1_16, run_few_gated},
    {kSwigluBf16M17_32, run_gate_few},
    {kSwigluBf16M33_64, run_share_gated},
    {kSwigluBf16M65_128, run_gate},
    {kSwigluBf16M65, run_wgmma_gated},
    {kSwigluFp8M1_64, run_fp8_gated_few},
    {kSwigluFp8M65, run_fp8_gated},
    {kSwigluInt8M33, run_int8_gated},
};
template <class R, int N>
constexpr bool in_order(const LaunchOf<R> (&runs)[N], int count) {
  for (int i = 0; i < N; ++i) {
    if (runs[i].kernel != i) return false;
  }
  return N == count;
}
static_assert(in_order(kRuns, kGemmKernels) && in_order(kGatedRuns, kSwigluKernels));

// Reports why no kernel ran, for error messages.
int no_row(const Context& ctx, const char* op, const GemmProblem& p) {
  std::snprintf(ctx.problem, sizeof ctx.problem,
                "no %s kernel for format %d, %d weights, the first %lld x %lld, %lld tokens on "
                "compute capability %d.%d",
                op, p.format, p.count, static_cast<long long>(p.of[0].rows),
                static_cast<long long>(p.of[0].cols), static_cast<long long>(p.tokens),
                ctx.capability / 10, ctx.capability % 10);
  return kNoKernel;
}

// The leading GEMMs of the same format, followed by those in format `other`.
ProductList list_of(const ProductArgs* products, int count, Code other) {
  ProductList list = {};
  Code code = products[0].weight.code;
  while (list.count < count && list.count < kMaxProducts) {
    const ProductArgs& p = products[list.count];
    if (p.weight.code == other) code = other;
    if (p.weight.code != code) break;
    list.of[list.count] = p;
    list.first_block[list.count + 1] =
        list.first_block[list.count] +
        static_cast<int32_t>(blocks_of_slices(p.weight.rows, p.weight.cols));
    ++list.count;
  }
  return list;
}

// How many GEMMs at the front of a list one launch runs: FP8 on Hopper needs the same number of
// split-K slices for all.
int launched_together(const Context& ctx, const ProductList& list) {
  const WeightView& first = list.of[0].weight;
  if (first.code != Code::kFP8 || ctx.capability != 90) return list.count;
  int count = 1;
  while (count < list.count && leaves8(list.of[count].weight) == leaves8(first)) ++count;
  return count;
}

GemmProblem problem_with_alignment(const ProductList& list, int64_t tokens) {
  GemmProblem p = problem_of(list, tokens);
  for (int i = 0; i < list.count; ++i) p.aligned = p.aligned && f32_aligned(list.of[i]);
  return p;
}

// Runs a list of one format.
int run_list(const Context& ctx, ProductList list, int64_t tokens) {
  while (list.count > 0) {
    ProductList part = list;
    part.count = launched_together(ctx, list);
    const GemmProblem p = problem_with_alignment(part, tokens);
    const int row = choose(kGemmRows, ctx, p, ctx.forced[kForcedMatmul]);
    if (row < 0) return no_row(ctx, "matmul", p);
    if (const int error = kRuns[row].run(ctx, part, tokens); error != 0) return error;
    list.count -= part.count;
    for (int i = 0; i < list.count; ++i) list.of[i] = list.of[part.count + i];
  }
  return 0;
}

// The row for a list of two formats; -1 if there is none.
int pair_row(const Context& ctx, const ProductList& list, int64_t tokens) {
  if ((kPairs & bit(list.of[0].weight.code)) == 0) return -1;
  const GemmProblem p = problem_of(list, tokens);
  const int row = choose(kGemmRows, ctx, p, ctx.forced[kForcedMatmul]);
  return row <= kGemmPairM65 ? row : -1;
}

}  // namespace

Order order_for(const Context& ctx, Code code, int64_t tokens) {
  return activation_order(ctx, code, tokens);
}

int products(const Context& ctx, const ProductArgs* products, int count, int64_t tokens,
             const NextProducts* next) {
  for (int first = 0; first < count;) {
    const ProductArgs* from = products + first;
    const ProductList both = list_of(from, count - first, Code::kQ6_K);
    if (const int row = pair_row(ctx, both, tokens); row >= 0) {
      if (const int error = kRuns[row].run(ctx, both, tokens); error != 0) return error;
      first += both.count;
      continue;
    }
    ProductList list = list_of(from, count - first, from[0].weight.code);
    if (first + list.count == count) list.next = next_weights(ctx, next, tokens);
    if (from[0].weight.code == Code::kExactF32) list.count = 1;
    if (const int error = run_list(ctx, list, tokens); error != 0) return error;
    first += list.count;
  }
  return 0;
}

int gated_fits(const Context& ctx, Code code, int64_t rows, int64_t cols, int64_t tokens) {
  GemmProblem p;
  p.tokens = tokens;
  p.add({code, rows, cols});
  p.add({code, rows, cols});
  return choose(kSwigluRows, ctx, p, ctx.forced[kForcedSwiglu]) >= 0 ? 1 : 0;
}

int gated_products(const Context& ctx, const ProductArgs* gate_and_up, int64_t tokens,
                   const Activations* act) {
  const ProductList list = list_of(gate_and_up, 2, gate_and_up[0].weight.code);
  const GemmProblem p = problem_of(list, tokens);
  const int row = choose(kSwigluRows, ctx, p, ctx.forced[kForcedSwiglu]);
  return row < 0 ? no_row(ctx, "swiglu", p) : kGatedRuns[row].run(ctx, list, tokens, *act);
}

}  // namespace freshet::cuda

// What a product brings near of those that come next while it waits: with up to eight tokens o
// waits for attention, which over short contexts leaves memory time, and gate and up, which come
// next, read more than any other product.
//
// Gate's and up's blocks ask for their first tiles as soon as they begin, so what lies behind these
// is brought, and no more of it than finds time and place.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/swiglu_q_sm90_m1_8.h"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int64_t kMostBytes = 7 << 20;  // of each matrix

template <class F>
NextWeights behind_first_tiles(const Context& ctx, const WeightView& gate, const WeightView& up) {
  const int64_t begin = tile_at<F>(2 * ctx.multiprocessors, gate.cols);
  const int64_t left = tile_at<F>(gate.rows / 16, gate.cols) - begin;
  const int64_t bytes = left < kMostBytes ? left : kMostBytes;
  return {{gate.data + begin, up.data + begin}, static_cast<int32_t>(bytes / kNextPart)};
}

}  // namespace

NextWeights next_weights(const Context& ctx, const NextProducts* next, int64_t tokens) {
  NextWeights weights = {};
  if (ctx.capability != 90 || tokens > kTokenTile || next == nullptr || next->count != 2) {
    return weights;
  }
  const WeightView &gate = next->of[0], &up = next->of[1];
  const bool alike = gate.code == up.code && gate.rows == up.rows && gate.cols == up.cols;
  if (!alike || !swiglu_large_n_takes(ctx, gate.rows, gate.cols)) return weights;
  with_format(gate.code, [&](auto f) {
    using F = decltype(f);
    if constexpr (kQuantised<F>) weights = behind_first_tiles<F>(ctx, gate, up);
  });
  return weights;
}

}  // namespace freshet::cuda

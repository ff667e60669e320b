// L2 prefetch of the next GEMMs' weights while this GEMM waits for its input. With up to eight
// tokens, o waits for attention, which leaves memory bandwidth free over short contexts; gate and
// up come next and read more than any other GEMM.
//
// The blocks of gate and up request their first tiles as soon as they begin, so the prefetch covers
// what follows these tiles, as far as time and L2 capacity allow.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/swiglu_q_sm90_m1_8.h"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int64_t kMostBytes = 7 << 20;  // per matrix

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

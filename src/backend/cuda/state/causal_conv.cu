// Depthwise causal convolutions over the tokens of a sequence. A thread has one channel, with the
// last inputs in registers. A sum starts with the bias and adds the taps in order, oldest input
// first.
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/state/state.cuh"

namespace freshet::cuda {
namespace {

constexpr int kConvThreads = 128;
// Inputs that are loaded together, while the previous ones are processed.
constexpr int kConvAhead = 16;
constexpr int kMostConvTaps = 16;

// If there are fewer taps than kTaps, zeros precede them, which change no sum. Grid: [channels,
// sequences].
template <int kTaps>
__global__ void __launch_bounds__(kConvThreads)
    causal_conv_kernel(const __grid_constant__ CausalConvArgs a) {
  let_next_start();
  const int64_t channels = a.x.cols;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kConvThreads + threadIdx.x;
  if (c >= channels) return;
  const int pad = kTaps - a.taps;
  float weight[kTaps], past[kTaps];
#pragma unroll
  for (int i = 0; i < kTaps; ++i) weight[i] = i < pad ? 0.0f : a.weight[(i - pad) * channels + c];
  const float bias = a.bias != nullptr ? a.bias[c] : 0.0f;
  const StepTokens s = step_tokens(a.state, static_cast<int>(blockIdx.y));
  wait();
  float* const state = state_at(a.state, s.slot) + c;
#pragma unroll
  for (int i = 0; i + 1 < kTaps; ++i) {
    past[i] = i < pad || s.begins ? 0.0f : state[(i - pad) * channels];
  }
  const auto save = [&](int slot) {
    float* const to = state_at(a.state, slot) + c;
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) {
      if (i >= pad) to[(i - pad) * channels] = past[i];
    }
  };
  float next[kConvAhead];
  const auto load = [&](int t) {
#pragma unroll
    for (int i = 0; i < kConvAhead; ++i) {
      next[i] = t + i < s.last ? a.x.data[(t + i) * a.x.stride + c] : 0.0f;
    }
  };
  load(s.first);
  for (int t = s.first; t < s.last; t += kConvAhead) {
    float x[kConvAhead];
#pragma unroll
    for (int i = 0; i < kConvAhead; ++i) x[i] = next[i];
    load(t + kConvAhead);
#pragma unroll
    for (int i = 0; i < kConvAhead; ++i) {
      if (t + i >= s.last) break;
      past[kTaps - 1] = x[i];
      float sum = bias;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum = __fmaf_rn(weight[j], past[j], sum);
#pragma unroll
      for (int j = 0; j + 1 < kTaps; ++j) past[j] = past[j + 1];
      if (a.silu != 0) sum = __fmul_rn(sum, sigmoid(sum));
      a.out.data[(t + i) * a.out.stride + c] = sum;
      if (const int slot = saved_at(a.state, t + i); slot >= 0) save(slot);
    }
  }
  save(s.slot);
}

}  // namespace

int causal_conv(const Context& ctx, const CausalConvArgs* args) {
  const auto kernel = args->taps <= 4 ? causal_conv_kernel<4> : causal_conv_kernel<kMostConvTaps>;
  const dim3 grid(static_cast<unsigned>(ceil_div(args->x.cols, kConvThreads)),
                  static_cast<unsigned>(args->state.sequences));
  return launch(ctx, kernel, grid, dim3(kConvThreads), 0, *args);
}

}  // namespace freshet::cuda

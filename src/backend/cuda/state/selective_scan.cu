// Mamba's selective scan. A thread has one channel with all its states in registers, and sums over
// the states in order. b and c, which all channels read, pass through shared memory.
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/state/state.cuh"

namespace freshet::cuda {
namespace {

constexpr int kSelectThreads = 64;
constexpr int kSelectTokens = 8;  // tokens whose inputs are loaded together

// e^x as a power of two; `steep` is x times log2(e).
__device__ __forceinline__ float two_to(float steep) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(steep));
  return power;
}

// kStates: at least the number of states; the others stay zero. Grid: [channels, sequences].
template <int kStates>
__global__ void __launch_bounds__(kSelectThreads)
    selective_scan_kernel(const __grid_constant__ SelectiveScanArgs a) {
  __shared__ float bs[kSelectTokens][kStates], cs[kSelectTokens][kStates];
  let_next_start();
  const int64_t channels = a.x.cols;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kSelectThreads + threadIdx.x;
  const bool real = c < channels;
  const int n = static_cast<int>(a.b.cols);
  const StepTokens s = step_tokens(a.state, static_cast<int>(blockIdx.y));
  const float bias = real && a.dt_bias != nullptr ? a.dt_bias[c] : 0.0f;
  const float d = real ? a.d[c] : 0.0f;
  float steep[kStates], h[kStates];
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    steep[i] = real && i < n ? __fmul_rn(a.a[i * channels + c], 1.4426950408889634f) : 0.0f;
  }
  wait();
  const float* const state = state_at(a.state, s.slot) + c;
#pragma unroll
  for (int i = 0; i < kStates; ++i) {
    h[i] = !s.begins && real && i < n ? state[i * channels] : 0.0f;
  }
  const auto save = [&](int slot) {
    if (!real) return;
    float* const to = state_at(a.state, slot) + c;
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      if (i < n) to[i * channels] = h[i];
    }
  };
  for (int t = s.first; t < s.last; t += kSelectTokens) {
    const int count = min(kSelectTokens, s.last - t);
    float x[kSelectTokens], dt[kSelectTokens];
#pragma unroll
    for (int i = 0; i < kSelectTokens; ++i) {
      const bool there = real && i < count;
      x[i] = there ? a.x.data[(t + i) * a.x.stride + c] : 0.0f;
      dt[i] = there ? a.dt.data[(t + i) * a.dt.stride + c] : 0.0f;
    }
    __syncthreads();  // all threads have finished with the previous tokens
    for (int i = static_cast<int>(threadIdx.x); i < kSelectTokens * kStates; i += kSelectThreads) {
      const int token = i / kStates, k = i % kStates;
      const bool there = token < count && k < n;
      bs[token][k] = there ? a.b.data[(t + token) * a.b.stride + k] : 0.0f;
      cs[token][k] = there ? a.c.data[(t + token) * a.c.stride + k] : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSelectTokens; ++i) {
      if (i >= count) break;
      const float step = softplus(__fadd_rn(dt[i], bias));
      const float dx = __fmul_rn(step, x[i]);
      float sum = __fmul_rn(d, x[i]);
#pragma unroll
      for (int k = 0; k < kStates; ++k) {
        const float decay = two_to(__fmul_rn(step, steep[k]));
        h[k] = __fmaf_rn(dx, bs[i][k], __fmul_rn(decay, h[k]));
        sum = __fmaf_rn(h[k], cs[i][k], sum);
      }
      if (real) a.out.data[(t + i) * a.out.stride + c] = sum;
      if (const int slot = saved_at(a.state, t + i); slot >= 0) save(slot);
    }
  }
  save(s.slot);
}

}  // namespace

int selective_scan(const Context& ctx, const SelectiveScanArgs* args) {
  if (args->b.cols > kMostSelectiveStates) return static_cast<int>(cudaErrorInvalidValue);
  const auto kernel =
      args->b.cols <= 16 ? selective_scan_kernel<16> : selective_scan_kernel<kMostSelectiveStates>;
  const dim3 grid(static_cast<unsigned>(ceil_div(args->x.cols, kSelectThreads)),
                  static_cast<unsigned>(args->state.sequences));
  return launch(ctx, kernel, grid, dim3(kSelectThreads), 0, *args);
}

}  // namespace freshet::cuda

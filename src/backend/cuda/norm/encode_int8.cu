// Encodes activations in INT8: a row is codes in [-127, 127] times the scale that maps 127 to its
// largest magnitude. Bit-identical to the CPU's encoder: each step is exact or rounds once. A row
// with a NaN or an infinity becomes zeros with a NaN scale.
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/runtime/common.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kMostHeld = 4;  // units of a thread in registers

struct Int8Scale {
  float down, up;  // up is 0 if all values are 0
};
// `top`: the bits of the largest magnitude, compared as integers: a NaN is the largest.
__device__ __forceinline__ Int8Scale int8_scale(uint32_t top) {
  constexpr float kSmallest = 1e-30f;
  if (top >= 0x7f800000) return {__uint_as_float(0x7fc00000), 0.0f};
  const float most = __uint_as_float(top);
  if (most < kSmallest) return {0.0f, 0.0f};
  return {__fdiv_rn(most, 127.0f), __fdiv_rn(127.0f, most)};
}

__device__ __forceinline__ uint32_t int8_bits(const float (&v)[kUnit], int first, float up) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int q = up == 0.0f ? 0 : __float2int_rn(__fmul_rn(v[first + i], up));
    bits |= (static_cast<uint32_t>(q) & 255) << (8 * i);
  }
  return bits;
}

struct Plainly {
  static constexpr bool kNorms = false;
  Rows x;
  __device__ __forceinline__ void load(float (&v)[kUnit], int64_t row, int64_t c) const {
    load_unit(v, x.data + row * x.stride, c, x.cols, whole_rows(x.data, x.stride));
  }
  __device__ __forceinline__ void load_weight(float (&)[kUnit], int64_t) const {}
  __device__ __forceinline__ void end(float (&)[kUnit], const float (&)[kUnit], float) const {}
};
// The output of glu() for gate and up.
struct Gated {
  static constexpr bool kNorms = false;
  Rows gate, up;
  GluArgs args;
  __device__ __forceinline__ void load(float (&v)[kUnit], int64_t row, int64_t c) const {
    float u[kUnit];
    load_unit(v, gate.data + row * gate.stride, c, gate.cols, whole_rows(gate.data, gate.stride));
    load_unit(u, up.data + row * up.stride, c, up.cols, whole_rows(up.data, up.stride));
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = c + i < gate.cols ? gated(v[i], u[i], args) : 0.0f;
  }
  __device__ __forceinline__ void load_weight(float (&)[kUnit], int64_t) const {}
  __device__ __forceinline__ void end(float (&)[kUnit], const float (&)[kUnit], float) const {}
};
// The output of norm() for rows with weights and no mean or bias, in its order of sums.
struct Normed {
  static constexpr bool kNorms = true;
  Rows x;
  const float* weight;
  float eps;
  __device__ __forceinline__ void load(float (&v)[kUnit], int64_t row, int64_t c) const {
    load_unit(v, x.data + row * x.stride, c, x.cols, whole_rows(x.data, x.stride));
  }
  __device__ __forceinline__ void load_weight(float (&w)[kUnit], int64_t c) const {
    load_unit(w, weight, c, x.cols, whole_rows(weight, 0));
  }
  __device__ __forceinline__ void end(float (&v)[kUnit], const float (&w)[kUnit],
                                      float scale) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], scale), w[i]);
  }
  // From the sum of a row's squares.
  __device__ __forceinline__ float scale(float sum) const {
    return rsqrtf(sum / static_cast<float>(x.cols) + eps);
  }
};

// A thread's part of a row: the first units in registers; later ones are read again.
template <class From, int kThreads>
struct Units {
  static constexpr int64_t kRound = int64_t{kThreads} * kUnit;
  const From& from;
  int64_t row, cols;
  float held[kMostHeld][kUnit], weights[From::kNorms ? kMostHeld : 1][kUnit];

  __device__ __forceinline__ static int64_t column(int n) {
    return threadIdx.x * int64_t{kUnit} + n * kRound;
  }
  // The norm's weights, loaded before the row is ready.
  __device__ __forceinline__ void load_weights() {
#pragma unroll
    for (int n = 0; From::kNorms && n < kMostHeld; ++n) {
      if (column(n) < cols) from.load_weight(weights[n], column(n));
    }
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int n = 0; n < kMostHeld; ++n) {
      if (column(n) < cols) from.load(held[n], row, column(n));
    }
  }
  __device__ __forceinline__ void end(float scale) {
#pragma unroll
    for (int n = 0; n < kMostHeld; ++n) {
      if (column(n) < cols) from.end(held[n], weights[From::kNorms ? n : 0], scale);
    }
  }
  // Calls body(unit, its column) from left to right. ended: units that are read again need end(),
  // too.
  template <class Body>
  __device__ __forceinline__ void each(bool ended, float scale, const Body& body) const {
#pragma unroll
    for (int n = 0; n < kMostHeld; ++n) {
      if (column(n) < cols) body(held[n], column(n));
    }
    for (int64_t c = column(kMostHeld); c < cols; c += kRound) {
      float v[kUnit], w[kUnit];
      from.load(v, row, c);
      if (ended) {
        from.load_weight(w, c);
        from.end(v, w, scale);
      }
      body(v, c);
    }
  }
};

// Sums over all threads, in one tree.
template <int kWarpsOfRow>
__device__ __forceinline__ float add_up(float sum, float* shared) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = shared[threadIdx.x % kWarpsOfRow];
#pragma unroll
  for (int step = kWarpsOfRow / 2; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  return sum;
}

// One block per row. Padding columns of the last tile are not written, since weights have zeros
// there.
template <class From, int kThreads>
__global__ void __launch_bounds__(kThreads)
    int8_rows_kernel(const __grid_constant__ From from, Activations act, int64_t cols) {
  constexpr int kWarpsOfRow = kThreads / 32;
  __shared__ uint32_t tops[kWarpsOfRow];
  let_next_start();
  const int64_t row = blockIdx.x;
  Units<From, kThreads> units{from, row, cols};
  units.load_weights();
  wait();
  units.load();
  float norm = 1.0f;
  if constexpr (From::kNorms) {
    __shared__ float sums[kWarpsOfRow];
    float sum = 0.0f;
    units.each(false, 0.0f, [&](const float(&v)[kUnit], int64_t) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum = __fmaf_rn(v[i], v[i], sum);
    });
    norm = from.scale(add_up<kWarpsOfRow>(sum, sums));
    units.end(norm);
  }
  uint32_t top = 0;
  units.each(true, norm, [&](const float(&v)[kUnit], int64_t) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) top = max(top, __float_as_uint(v[i]) & 0x7fffffff);
  });
  top = __reduce_max_sync(0xffffffff, top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  const Int8Scale scale =
      int8_scale(__reduce_max_sync(0xffffffff, tops[threadIdx.x % kWarpsOfRow]));
  units.each(true, norm, [&](const float(&v)[kUnit], int64_t c) {
    uint8_t* tile = act.data + ((c >> 7) * act.core_tiles + (row >> 3)) * kInt8TileBytes;
    *reinterpret_cast<uint2*>(tile + (c >> 4 & 7) * 128 + (row & 7) * 16 + (c & 15)) =
        make_uint2(int8_bits(v, 0, scale.up), int8_bits(v, 4, scale.up));
  });
  if (threadIdx.x != 0) return;
  const int64_t steps = (cols + kInt8Cols - 1) / kInt8Cols;
  reinterpret_cast<float*>(act.data + steps * act.core_tiles * kInt8TileBytes)[row] = scale.down;
}

// With few rows, latency dominates, so more threads share a row.
template <class From>
int launch_rows(const Context& ctx, const From& from, const Activations& act, int64_t rows,
                int64_t cols) {
  const dim3 grid(static_cast<unsigned>(rows));
  if (rows <= 2 * ctx.multiprocessors && cols > 128 * kUnit) {
    return launch(ctx, int8_rows_kernel<From, 512>, grid, dim3(512), 0, from, act, cols);
  }
  if (cols > 128 * kUnit * kMostHeld) {
    return launch(ctx, int8_rows_kernel<From, 512>, grid, dim3(512), 0, from, act, cols);
  }
  return launch(ctx, int8_rows_kernel<From, 128>, grid, dim3(128), 0, from, act, cols);
}

}  // namespace

int encode_int8(const Context& ctx, const Activations& act, const Rows& x) {
  return launch_rows(ctx, Plainly{x}, act, x.rows, x.cols);
}

int glu_int8(const Context& ctx, const Rows& gate, const Rows& up, const GluArgs& glu,
             const Activations& act) {
  return launch_rows(ctx, Gated{gate, up, glu}, act, gate.rows, gate.cols);
}

int norm_int8(const Context& ctx, const Rows& x, const NormArgs& norm, const Activations& act) {
  // The order of a sum depends on the number of threads.
  return launch(ctx, int8_rows_kernel<Normed, 512>, dim3(static_cast<unsigned>(x.rows)), dim3(512),
                0, Normed{x, norm.weight, norm.eps}, act, x.cols);
}

}  // namespace freshet::cuda

// Elementwise operations: encoding, GLU and other activations, sums of matrices.
#include <climits>

#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/common.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kThreads = 256;

// Blocks of 256 threads, each with eight adjacent elements: rows are padded to 8 and columns to 64
// (E4M3: 128) with zeros, as in all activations.
__global__ void encode_kernel(Activations act, Rows x, const int32_t* index, const float* weights,
                              int64_t rows) {
  let_next_start();
  wait();
  const int64_t row = blockIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kUnit;
  if (c >= padded_cols(act, x.cols)) return;
  const int64_t from = row < rows ? (index != nullptr ? index[row] : row) : -1;
  const float factor = weights != nullptr && from >= 0 ? weights[row] : 1.0f;
  float v[kUnit];
  load_unit(v, x.data + from * x.stride, c, from >= 0 ? x.cols : 0, whole_rows(x.data, x.stride));
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] *= factor;
  put_any(act, row, c, x.cols, v);
}

__global__ void rope_table_kernel(float* cos_sin, const int32_t* positions, const float* inv_freq,
                                  int64_t half, float scale, float gain, float interval) {
  let_next_start();
  wait();
  const int64_t t = blockIdx.x;
  double factor = scale;
  if (gain != 0.0f) {
    const float steps = floorf(__fdiv_rn(static_cast<float>(positions[t]) + 1.0f, interval));
    factor = scale * (1.0 + gain * log1p(static_cast<double>(steps)));
  }
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    double s, c;
    sincos(static_cast<double>(__fmul_rn(static_cast<float>(positions[t]), inv_freq[i])), &s, &c);
    cos_sin[t * 2 * half + i] = static_cast<float>(factor * c);
    cos_sin[t * 2 * half + half + i] = static_cast<float>(factor * s);
  }
}

__global__ void glu_kernel(Rows out, Rows gate, Rows up, GluArgs a, Activations act) {
  let_next_start();
  wait();
  const int64_t row = blockIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kUnit;
  if (c >= padded_cols(act, out.cols)) return;
  const int64_t n = row < out.rows ? out.cols : 0;
  float v[kUnit], u[kUnit];
  load_unit(v, gate.data + row * gate.stride, c, n, whole_rows(gate.data, gate.stride));
  load_unit(u, up.data + row * up.stride, c, n, whole_rows(up.data, up.stride));
#pragma unroll
  for (int i = 0; i < kUnit; ++i) v[i] = c + i < n ? gated(v[i], u[i], a) : 0.0f;
  if (out.data != nullptr) {
    store_unit(out.data + row * out.stride, v, c, n, whole_rows(out.data, out.stride));
  }
  if (act.data != nullptr) put_any(act, row, c, out.cols, v);
}

// Calls body(row, col) for every element.
template <class Body>
__device__ __forceinline__ void each(const Rows& x, Body body) {
  let_next_start();
  wait();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c < x.cols) body(static_cast<int64_t>(blockIdx.y), c);
}

__global__ void activation_kernel(Rows x, int kind) {
  each(x, [&](int64_t r, int64_t c) {
    float& v = x.data[r * x.stride + c];
    v = activate(v, kind);
  });
}
__global__ void add_kernel(Rows out, Rows x, float factor) {
  each(x, [&](int64_t r, int64_t c) {
    float& v = out.data[r * out.stride + c];
    v = __fmaf_rn(factor, x.data[r * x.stride + c], v);
  });
}
__global__ void scale_kernel(Rows x, float factor) {
  each(x, [&](int64_t r, int64_t c) { x.data[r * x.stride + c] *= factor; });
}
__global__ void softcap_kernel(Rows x, float cap) {
  each(x, [&](int64_t r, int64_t c) {
    float& v = x.data[r * x.stride + c];
    v = cap * tanhf(v / cap);
  });
}
__global__ void gather_kernel(Rows out, Rows x, const int32_t* rows) {
  each(out, [&](int64_t r, int64_t c) {
    out.data[r * out.stride + c] = x.data[rows[r] * x.stride + c];
  });
}
__global__ void sigmoid_gate_kernel(Rows x, Rows gate) {
  each(x, [&](int64_t r, int64_t c) {
    x.data[r * x.stride + c] *= sigmoid(gate.data[r * gate.stride]);
  });
}

__global__ void sigmoid_product_kernel(Rows x, Rows gate) {
  each(x, [&](int64_t r, int64_t c) {
    x.data[r * x.stride + c] *= sigmoid(gate.data[r * gate.stride + c]);
  });
}
__global__ void xielu_kernel(Rows x, float positive, float negative, float beta, float eps) {
  each(x, [&](int64_t r, int64_t c) {
    const float v = x.data[r * x.stride + c];
    const float curve = v > 0.0f ? positive * v * v : negative * (expm1f(fminf(v, eps)) - v);
    x.data[r * x.stride + c] = curve + beta * v;
  });
}

// A block's columns; those that are listed become zeros, and go to `apart`. A thread looks its
// column up in the list, which ascends.
__global__ void split_columns_kernel(Rows kept, Rows apart, Rows x, const int32_t* columns) {
  each(x, [&](int64_t r, int64_t c) {
    const float v = x.data[r * x.stride + c];
    int64_t first = 0, last = apart.cols;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (columns[middle] < c) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    const bool listed = first < apart.cols && columns[first] == c;
    if (listed) apart.data[r * apart.stride + first] = v;
    kept.data[r * kept.stride + c] = listed ? 0.0f : v;
  });
}

// Argmax with one block per row. Larger values come first, ties go to the lower column, so the
// order of threads doesn't matter.
constexpr int kArgmaxThreads = 1024;

struct Best {
  float value;
  int column;
};
__device__ __forceinline__ Best better(const Best& a, const Best& b) {
  return b.value > a.value || (b.value == a.value && b.column < a.column) ? b : a;
}
__device__ __forceinline__ Best best_of_warp(Best best) {
  for (int step = 16; step > 0; step >>= 1) {
    best = better(best, {__shfl_xor_sync(0xffffffff, best.value, step),
                         __shfl_xor_sync(0xffffffff, best.column, step)});
  }
  return best;
}

__global__ void __launch_bounds__(kArgmaxThreads) argmax_kernel(Rows x, int32_t* ids) {
  __shared__ Best shared[kArgmaxThreads / 32];
  let_next_start();
  wait();
  const float* row = x.data + blockIdx.x * x.stride;
  const bool whole = whole_rows(x.data, x.stride);
  Best best = {-INFINITY, INT_MAX};
  constexpr int64_t kStep = int64_t{kArgmaxThreads} * kUnit;
#pragma unroll 4
  for (int64_t c = threadIdx.x * int64_t{kUnit}; c < x.cols; c += kStep) {
    float v[kUnit];
    load_unit(v, row, c, x.cols, whole);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (c + i < x.cols && v[i] > best.value) best = {v[i], static_cast<int>(c) + i};
    }
  }
  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = best_of_warp(shared[threadIdx.x]);
  if (threadIdx.x == 0) ids[blockIdx.x] = best.value > -INFINITY ? best.column : -1;
}

// The same for rows in whole 16-byte units, one cluster per row: all loads of 128,256 columns are
// in flight at once. The first block combines the results.
constexpr int kArgmaxBlocks = 8, kArgmaxOfBlock = 512;

__global__ void __launch_bounds__(kArgmaxOfBlock) argmax_cluster_kernel(Rows x, int32_t* ids) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kWarpsOfBlock = kArgmaxOfBlock / 32, kApart = kArgmaxBlocks * kArgmaxOfBlock;
  constexpr int kAtOnce = 8;
  __shared__ Best shared[kWarpsOfBlock];
  __shared__ float2 bests[kArgmaxBlocks];
  __shared__ uint64_t there;
  let_next_start();
  const int rank = static_cast<int>(blockIdx.x) % kArgmaxBlocks;
  const int row = static_cast<int>(blockIdx.x) / kArgmaxBlocks;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    barrier_init(&there, 1);
    barrier_expect(&there, sizeof bests);
    barriers_ready();
  }
  __syncwarp();
  cluster_arrive_relaxed();
  cluster_wait();
  wait();
  const auto* from = reinterpret_cast<const float4*>(x.data + row * x.stride);
  const auto n = static_cast<int>(x.cols / 4);
  Best best = {-INFINITY, INT_MAX};
  for (int first = rank * kArgmaxOfBlock + static_cast<int>(threadIdx.x); first < n;
       first += kAtOnce * kApart) {
    float4 v[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = first + j * kApart;
      v[j] = at < n ? from[at] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float four[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (four[i] > best.value) best = {four[i], (first + j * kApart) * 4 + i};
      }
    }
  }
  best = best_of_warp(best);
  if (lane == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = best_of_warp(shared[lane % kWarpsOfBlock]);
  if (lane == 0) {
    send_to_block(&bests[rank], 0, make_float2(best.value, __int_as_float(best.column)), &there);
  }
  if (rank > 0) return;
  barrier_wait(&there, 0);
  const float2 its = bests[lane % kArgmaxBlocks];
  best = best_of_warp({its.x, __float_as_int(its.y)});
  if (lane == 0) ids[row] = best.value > -INFINITY ? best.column : -1;
#endif
}

dim3 grid_of(int64_t cols, int64_t rows) {
  return dim3(static_cast<unsigned>(ceil_div(cols, kThreads)), static_cast<unsigned>(rows));
}
int64_t padded_rows(int64_t rows) {
  return ceil_div(rows, kTokenTile) * kTokenTile;
}
dim3 units_of(const Activations& act, int64_t cols, int64_t rows) {
  return grid_of(padded_cols(act, cols) / kUnit, rows);
}

}  // namespace

int64_t fragment_bytes(const Context&, int64_t rows, int64_t cols) {
  const int64_t bf16 = padded_rows(rows) * ceil_div(cols, kPadCols) * kPadCols * 2;
  const int64_t e4m3 = ceil_div(rows, kTokenTile) * ceil_div(cols, kE4M3Cols) * kE4M3TileBytes;
  return bf16 > e4m3 ? bf16 : e4m3;
}

int encode(const Context& ctx, const Activations* act, const Rows* x, const int32_t* index,
           const float* weights, int64_t rows) {
  if (act->int8 != 0) return encode_int8(ctx, *act, *x);
  return launch(ctx, encode_kernel, units_of(*act, x->cols, padded_rows(rows)), dim3(kThreads), 0,
                *act, *x, index, weights, rows);
}

int rope_table(const Context& ctx, float* cos_sin, const int32_t* positions, const float* inv_freq,
               int64_t tokens, int64_t half, float scale, float gain, float interval) {
  return launch(ctx, rope_table_kernel, dim3(static_cast<unsigned>(tokens)), dim3(64), 0, cos_sin,
                positions, inv_freq, half, scale, gain, interval);
}

int glu(const Context& ctx, const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
        const Activations* act) {
  if (act->data != nullptr && act->int8 != 0) return glu_int8(ctx, *gate, *up, *glu, *act);
  const int64_t rows = act->data != nullptr ? padded_rows(out->rows) : out->rows;
  return launch(ctx, glu_kernel, units_of(*act, out->cols, rows), dim3(kThreads), 0, *out, *gate,
                *up, *glu, *act);
}
int activation(const Context& ctx, const Rows* x, int activation) {
  return launch(ctx, activation_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x,
                activation);
}
int add(const Context& ctx, const Rows* out, const Rows* x, float scale) {
  return launch(ctx, add_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *out, *x, scale);
}
int scale(const Context& ctx, const Rows* x, float scale) {
  return launch(ctx, scale_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, scale);
}
int softcap(const Context& ctx, const Rows* x, float cap) {
  return launch(ctx, softcap_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, cap);
}
int gather(const Context& ctx, const Rows* out, const Rows* x, const int32_t* rows) {
  return launch(ctx, gather_kernel, grid_of(out->cols, out->rows), dim3(kThreads), 0, *out, *x,
                rows);
}
int sigmoid_gate(const Context& ctx, const Rows* x, const Rows* gate) {
  return launch(ctx, sigmoid_gate_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, *gate);
}
int sigmoid_product(const Context& ctx, const Rows* x, const Rows* gate) {
  return launch(ctx, sigmoid_product_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x,
                *gate);
}
int xielu(const Context& ctx, const Rows* x, float positive, float negative, float beta,
          float eps) {
  return launch(ctx, xielu_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, positive,
                negative, beta, eps);
}
int split_columns(const Context& ctx, const Rows* kept, const Rows* apart, const Rows* x,
                  const int32_t* columns) {
  return launch(ctx, split_columns_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *kept,
                *apart, *x, columns);
}
int argmax(const Context& ctx, const Rows* x, int32_t* ids) {
  if (ctx.capability >= 90 && x->cols % 4 == 0 && x->cols >= kArgmaxBlocks * kArgmaxOfBlock &&
      whole_rows(x->data, x->stride)) {
    return launch_cluster(ctx, argmax_cluster_kernel,
                          dim3(static_cast<unsigned>(x->rows * kArgmaxBlocks)),
                          dim3(kArgmaxOfBlock), 0, dim3(kArgmaxBlocks), *x, ids);
  }
  return launch(ctx, argmax_kernel, dim3(static_cast<unsigned>(x->rows)), dim3(kArgmaxThreads), 0,
                *x, ids);
}

}  // namespace freshet::cuda

// Ops on rows: norms, rotation, activations. Sums run in an order that the row's length fixes.
#include "backend/cuda/common.cuh"
#include "backend/cuda/gating.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kThreads = 256;

// Activations as fragments: rows padded to 8 and columns to 64 with zeros.
__device__ __forceinline__ int64_t padded(int64_t cols) {
  return (cols + kPadCols - 1) / kPadCols * kPadCols;
}

__global__ void encode_kernel(Activations act, Rows x, const int32_t* index, const float* weights,
                              int64_t rows) {
  let_next_start();
  wait();
  const int64_t row = blockIdx.y;
  int64_t from = row < rows ? (index != nullptr ? index[row] : row) : -1;
  const float factor = weights != nullptr && from >= 0 ? weights[row] : 1.0f;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 2;
  if (c >= padded(x.cols)) return;
  const float* p = x.data + from * x.stride;
  const float low = from >= 0 && c < x.cols ? p[c] * factor : 0.0f;
  const float high = from >= 0 && c + 1 < x.cols ? p[c + 1] * factor : 0.0f;
  put_pair(act, row, c, x.cols, low, high);
}

// E4M3: a half warp takes 128 columns, and its scale takes the largest of them to 448.
__global__ void encode_e4m3_kernel(Activations act, Rows x) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  let_next_start();
  wait();
  const int64_t row = blockIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (c >= ceil_div(x.cols, kE4M3Cols) * kE4M3Cols) return;
  float v[8];
  for (int i = 0; i < 8; ++i) {
    v[i] = row < x.rows && c + i < x.cols ? x.data[row * x.stride + c + i] : 0.0f;
  }
  put_e4m3(act, row, c, v);
#endif
}

// Wide rows by kWide threads, kHeld numbers each in registers; what is left over is read again.
constexpr int kWide = 512, kHeld = 16;

template <int Threads>
__device__ __forceinline__ float sum_of_block(float v, float* shared) {
  for (int step = 16; step > 0; step >>= 1) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < Threads / 32 ? shared[threadIdx.x % 32] : 0.0f;
  for (int step = 16; step > 0; step >>= 1) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  }
  __syncthreads();
  return v;
}

template <int Threads>
__device__ __forceinline__ void norm_row(float* out, const float* x, int64_t n, const NormArgs& a,
                                         int64_t offset, float* shared, const Activations& act,
                                         int64_t row) {
  const int64_t first = threadIdx.x * 2;
  float held[kHeld];
  // Number i of a thread: pairs stand 2 Threads apart.
  const auto at = [&](int i) { return first + static_cast<int64_t>(i / 2) * 2 * Threads + i % 2; };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = at(i) < n ? x[at(i)] : 0.0f;
  const int64_t rest = first + static_cast<int64_t>(kHeld) * Threads;
  float mean = 0.0f;
  if (a.layer != 0) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum = __fadd_rn(sum, held[i]);
    for (int64_t c = rest; c < n; c += 2 * Threads) {
      sum = __fadd_rn(sum, x[c]);
      if (c + 1 < n) sum = __fadd_rn(sum, x[c + 1]);
    }
    mean = sum_of_block<Threads>(sum, shared) / static_cast<float>(n);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const float d = at(i) < n ? held[i] - mean : 0.0f;
    sum = __fmaf_rn(d, d, sum);
  }
  for (int64_t c = rest; c < n; c += 2 * Threads) {
    for (int i = 0; i < 2 && c + i < n; ++i) {
      const float d = x[c + i] - mean;
      sum = __fmaf_rn(d, d, sum);
    }
  }
  const float scale = rsqrtf(sum_of_block<Threads>(sum, shared) / static_cast<float>(n) + a.eps);
  const auto value = [&](int64_t i, float v) {
    v = __fmul_rn(__fsub_rn(v, mean), scale);
    if (a.weight != nullptr) v = __fmul_rn(v, a.weight[offset + i]);
    if (a.bias != nullptr) v = __fadd_rn(v, a.bias[offset + i]);
    return v;
  };
  const int64_t end = act.data != nullptr ? padded(n) : n;
  const auto put = [&](int64_t c, float v0, float v1) {
    const float low = c < n ? value(c, v0) : 0.0f;
    const float high = c + 1 < n ? value(c + 1, v1) : 0.0f;
    if (c < n) out[c] = low;
    if (c + 1 < n) out[c + 1] = high;
    if (act.data != nullptr) put_pair(act, row, c, n, low, high);
  };
#pragma unroll
  for (int i = 0; i < kHeld; i += 2) {
    if (at(i) < end) put(at(i), held[i], held[i + 1]);
  }
  for (int64_t c = rest; c < end; c += 2 * Threads) {
    put(c, c < n ? x[c] : 0.0f, c + 1 < n ? x[c + 1] : 0.0f);
  }
}

__global__ void __launch_bounds__(kWide)
    norm_kernel(Rows out, Rows x, NormArgs a, Activations act) {
  __shared__ float shared[32];
  let_next_start();
  wait();
  const int64_t row = blockIdx.x;
  if (row >= x.rows) {  // padding of the activations
    for (int64_t i = threadIdx.x * 2; i < padded(x.cols); i += kWide * 2) {
      put_pair(act, row, i, x.cols, 0.0f, 0.0f);
    }
    return;
  }
  norm_row<kWide>(out.data + row * out.stride, x.data + row * x.stride, x.cols, a, 0, shared, act,
                  row);
}

__global__ void __launch_bounds__(32)
    norm_heads_kernel(Rows x, int head_dim, NormArgs a, int per_head) {
  __shared__ float shared[32];
  let_next_start();
  wait();
  float* p = x.data + blockIdx.x * x.stride + static_cast<int64_t>(blockIdx.y) * head_dim;
  norm_row<32>(p, p, head_dim, a, per_head != 0 ? static_cast<int64_t>(blockIdx.y) * head_dim : 0,
               shared, Activations{}, 0);
}

__global__ void rope_table_kernel(float* cos_sin, const int32_t* positions, const float* inv_freq,
                                  int64_t half, float scale) {
  let_next_start();
  wait();
  const int64_t t = blockIdx.x;
  for (int64_t i = threadIdx.x; i < half; i += blockDim.x) {
    double s, c;
    sincos(static_cast<double>(__fmul_rn(static_cast<float>(positions[t]), inv_freq[i])), &s, &c);
    cos_sin[t * 2 * half + i] = static_cast<float>(scale * c);
    cos_sin[t * 2 * half + half + i] = static_cast<float>(scale * s);
  }
}

struct RopePair {
  RopeArgs of[2];
};

// Pairs a thread rotates: neighbours, so that they are one load where halves stand apart.
constexpr int kPairs = 4;

__device__ __forceinline__ void rotate(float& first, float& second, float c, float s) {
  const float x = first, y = second;
  first = __fmaf_rn(x, c, -__fmul_rn(y, s));
  second = __fmaf_rn(y, c, __fmul_rn(x, s));
}

__global__ void rope_kernel(RopePair pair, const float* cos_sin) {
  let_next_start();
  wait();
  const RopeArgs& a = pair.of[blockIdx.y];
  const int half = a.rotary_dim / 2;
  const float* table = cos_sin + blockIdx.x * static_cast<int64_t>(a.rotary_dim);
  float* row = a.x + blockIdx.x * a.stride + a.offset;
  const int at = (static_cast<int>(blockIdx.z) * kThreads + static_cast<int>(threadIdx.x)) * kPairs;
  if (at >= a.heads * half) return;
  const auto whole = [](int64_t n) { return n % kPairs == 0; };
  if (a.interleaved == 0 && whole(half) && whole(a.head_dim) && whole(a.stride) &&
      whole(reinterpret_cast<intptr_t>(row) / 4) && whole(reinterpret_cast<intptr_t>(table) / 4)) {
    const int k = at % half;
    float* head = row + static_cast<int64_t>(at / half) * a.head_dim + k;
    auto* x = reinterpret_cast<float4*>(head);
    auto* y = reinterpret_cast<float4*>(head + half);
    const float4 c = *reinterpret_cast<const float4*>(table + k);
    const float4 s = *reinterpret_cast<const float4*>(table + half + k);
    float4 first = *x, second = *y;
    rotate(first.x, second.x, c.x, s.x);
    rotate(first.y, second.y, c.y, s.y);
    rotate(first.z, second.z, c.z, s.z);
    rotate(first.w, second.w, c.w, s.w);
    *x = first;
    *y = second;
    return;
  }
  for (int i = at; i < min(at + kPairs, a.heads * half); ++i) {
    float* head = row + static_cast<int64_t>(i / half) * a.head_dim;
    const int k = i % half;
    rotate(head[a.interleaved != 0 ? 2 * k : k], head[a.interleaved != 0 ? 2 * k + 1 : k + half],
           table[k], table[half + k]);
  }
}

__global__ void glu_kernel(Rows out, Rows gate, Rows up, GluArgs a, Activations act) {
  let_next_start();
  wait();
  const int64_t row = blockIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 2;
  if (c >= padded(out.cols)) return;
  float v[2] = {0.0f, 0.0f};
  for (int i = 0; i < 2; ++i) {
    if (row >= out.rows || c + i >= out.cols) continue;
    v[i] = gated(gate.data[row * gate.stride + c + i], up.data[row * up.stride + c + i], a);
    out.data[row * out.stride + c + i] = v[i];
  }
  if (act.data != nullptr) put_pair(act, row, c, out.cols, v[0], v[1]);
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

dim3 grid_of(int64_t cols, int64_t rows) {
  return dim3(static_cast<unsigned>(ceil_div(cols, kThreads)), static_cast<unsigned>(rows));
}
int64_t padded_rows(int64_t rows) {
  return ceil_div(rows, kTokenTile) * kTokenTile;
}
dim3 pairs_of(int64_t cols, int64_t rows) {
  return grid_of(ceil_div(cols, kPadCols) * kPadCols / 2, rows);
}

}  // namespace

int64_t fragment_bytes(int64_t rows, int64_t cols) {
  const int64_t bf16 = padded_rows(rows) * ceil_div(cols, kPadCols) * kPadCols * 2;
  const int64_t e4m3 = ceil_div(rows, kTokenTile) * ceil_div(cols, kE4M3Cols) * kE4M3TileBytes;
  return bf16 > e4m3 ? bf16 : e4m3;
}

int encode(const Activations* act, const Rows* x, const int32_t* index, const float* weights,
           int64_t rows) {
  if (act->e4m3 != 0) {
    const int64_t units = ceil_div(x->cols, kE4M3Cols) * kE4M3Cols / 8;
    return launch(encode_e4m3_kernel, grid_of(units, padded_rows(rows)), dim3(kThreads), 0, *act,
                  *x);
  }
  return launch(encode_kernel, pairs_of(x->cols, padded_rows(rows)), dim3(kThreads), 0, *act, *x,
                index, weights, rows);
}

int norm(const Rows* out, const Rows* x, const NormArgs* norm, const Activations* act) {
  const int64_t rows = act->data != nullptr ? padded_rows(x->rows) : x->rows;
  return launch(norm_kernel, dim3(static_cast<unsigned>(rows)), dim3(kWide), 0, *out, *x, *norm,
                *act);
}

int norm_heads(const Rows* x, int heads, int head_dim, const NormArgs* norm, int per_head) {
  return launch(norm_heads_kernel,
                dim3(static_cast<unsigned>(x->rows), static_cast<unsigned>(heads)), dim3(32), 0, *x,
                head_dim, *norm, per_head);
}

int rope_table(float* cos_sin, const int32_t* positions, const float* inv_freq, int64_t tokens,
               int64_t half, float scale) {
  return launch(rope_table_kernel, dim3(static_cast<unsigned>(tokens)), dim3(64), 0, cos_sin,
                positions, inv_freq, half, scale);
}

int rope(const RopeArgs* args, int count, const float* cos_sin) {
  RopePair pair = {};
  int64_t pairs = 0;
  for (int i = 0; i < count; ++i) {
    pair.of[i] = args[i];
    const int64_t its = static_cast<int64_t>(args[i].heads) * args[i].rotary_dim / 2;
    pairs = its > pairs ? its : pairs;
  }
  const dim3 grid(static_cast<unsigned>(args->rows), static_cast<unsigned>(count),
                  static_cast<unsigned>(ceil_div(pairs, kThreads * kPairs)));
  return launch(rope_kernel, grid, dim3(kThreads), 0, pair, cos_sin);
}

int glu(const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
        const Activations* act) {
  const int64_t rows = act->data != nullptr ? padded_rows(out->rows) : out->rows;
  return launch(glu_kernel, pairs_of(out->cols, rows), dim3(kThreads), 0, *out, *gate, *up, *glu,
                *act);
}
int activation(const Rows* x, int activation) {
  return launch(activation_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, activation);
}
int add(const Rows* out, const Rows* x, float scale) {
  return launch(add_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *out, *x, scale);
}
int scale(const Rows* x, float scale) {
  return launch(scale_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, scale);
}
int softcap(const Rows* x, float cap) {
  return launch(softcap_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, cap);
}
int gather(const Rows* out, const Rows* x, const int32_t* rows) {
  return launch(gather_kernel, grid_of(out->cols, out->rows), dim3(kThreads), 0, *out, *x, rows);
}
int sigmoid_gate(const Rows* x, const Rows* gate) {
  return launch(sigmoid_gate_kernel, grid_of(x->cols, x->rows), dim3(kThreads), 0, *x, *gate);
}

}  // namespace freshet::cuda

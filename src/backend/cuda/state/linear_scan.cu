// Scans whose state is a matrix per head: Mamba-2, linear attention with decay, and the gated delta
// rule.
//
// A warp has some columns of a head's state, and a thread kSliceRows rows of one of them, in
// registers. A sum over the rows is four sums of every fourth row of a slice, added in pairs; the
// slices' sums are then added as a tree. The inputs that the columns of a head share pass through
// shared memory, kScanTokens tokens ahead.
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/state/state.cuh"

namespace freshet::cuda {
namespace {

constexpr int kSliceRows = 32;
constexpr int kSlicePad = kSliceRows + 4;  // in shared memory, so that slices use different banks
constexpr int kScanTokens = 8;
constexpr int kMostScanWarps = 8;

// Arguments of both scans: b and c have one element per state row, x has one per column.
struct ScanArgs {
  Rows x, out, b, c;
  Rows dt;    // no data: all steps are 1
  Rows beta;  // delta rule only
  const float *dt_bias, *a, *d;
  float dt_min, dt_max;
  int32_t heads, dim, sharing, n;  // `sharing` heads have the same b and c
  StateArgs state;
};

struct ScanStep {
  float step, decay;  // delta rule: step is sigmoid(beta)
};

// The step of a head from a token's inputs.
template <bool kDelta>
__device__ __forceinline__ ScanStep step_of(const ScanArgs& a, int head, float dt, float beta) {
  float step = 1.0f;
  if (a.dt.data != nullptr) {
    step = a.dt_bias != nullptr ? __fadd_rn(dt, a.dt_bias[head]) : dt;
    step = softplus(step);
    if (a.dt_max > 0.0f) step = fminf(fmaxf(step, a.dt_min), a.dt_max);
  }
  const float decay = expf(__fmul_rn(step, a.a[head]));
  return {kDelta ? sigmoid(beta) : step, decay};
}

// The inputs of kScanTokens tokens in shared memory.
template <int kSlices>
struct ScanRoom {
  static constexpr int kColumns = 32 / kSlices * kMostScanWarps;
  float b[kScanTokens][kSlices * kSlicePad], c[kScanTokens][kSlices * kSlicePad];
  float x[kScanTokens][kColumns];
  float dt[kScanTokens], beta[kScanTokens];
  ScanStep steps[kScanTokens];
};

// Adds the slices' sums; all lanes get the result.
template <int kSlices>
__device__ __forceinline__ float sum_of_slices(float v) {
#pragma unroll
  for (int apart = 32 / kSlices; apart < 32; apart *= 2) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, apart));
  }
  return v;
}
__device__ __forceinline__ float sum_of_four(const float (&v)[4]) {
  return __fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3]));
}

// Processes one token: advances a thread's rows of the state, and returns the sum over all rows.
template <int kSlices, bool kDelta>
__device__ __forceinline__ float advance(float (&h)[kSliceRows], const float* b, const float* c,
                                         float x, const ScanStep& s) {
  float sum[4] = {};
  if (!kDelta) {
    const float input = __fmul_rn(x, s.step);
#pragma unroll
    for (int r = 0; r < kSliceRows; r += 4) {
      const float4 bs = *reinterpret_cast<const float4*>(b + r);
      const float4 cs = *reinterpret_cast<const float4*>(c + r);
      const float bv[4] = {bs.x, bs.y, bs.z, bs.w}, cv[4] = {cs.x, cs.y, cs.z, cs.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        h[r + i] = __fmaf_rn(input, bv[i], __fmul_rn(h[r + i], s.decay));
        sum[i] = __fmaf_rn(h[r + i], cv[i], sum[i]);
      }
    }
    return sum_of_slices<kSlices>(sum_of_four(sum));
  }
  float seen[4] = {};
#pragma unroll
  for (int r = 0; r < kSliceRows; r += 4) {
    const float4 bs = *reinterpret_cast<const float4*>(b + r);
    const float bv[4] = {bs.x, bs.y, bs.z, bs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      h[r + i] = __fmul_rn(h[r + i], s.decay);
      seen[i] = __fmaf_rn(h[r + i], bv[i], seen[i]);
    }
  }
  const float known = sum_of_slices<kSlices>(sum_of_four(seen));
  const float input = __fmul_rn(__fsub_rn(x, known), s.step);
#pragma unroll
  for (int r = 0; r < kSliceRows; r += 4) {
    const float4 bs = *reinterpret_cast<const float4*>(b + r);
    const float4 cs = *reinterpret_cast<const float4*>(c + r);
    const float bv[4] = {bs.x, bs.y, bs.z, bs.w}, cv[4] = {cs.x, cs.y, cs.z, cs.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      h[r + i] = __fmaf_rn(input, bv[i], h[r + i]);
      sum[i] = __fmaf_rn(h[r + i], cv[i], sum[i]);
    }
  }
  return sum_of_slices<kSlices>(sum_of_four(sum));
}

// Blocks: [columns of a head, heads, sequences].
template <int kSlices, bool kDelta>
__global__ void __launch_bounds__(kMostScanWarps * 32, 2)
    scan_kernel(const __grid_constant__ ScanArgs a) {
  using Room = ScanRoom<kSlices>;
  constexpr int kColumnsOfWarp = 32 / kSlices;
  extern __shared__ __align__(16) uint8_t scan_memory[];
  auto* const rooms = reinterpret_cast<Room*>(scan_memory);
  let_next_start();
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32, slice = lane / kColumnsOfWarp;
  const int columns = threads / 32 * kColumnsOfWarp;  // in this block
  const int in_block = thread / 32 * kColumnsOfWarp + lane % kColumnsOfWarp;
  const int first_column = static_cast<int>(blockIdx.x) * columns;
  const int column = first_column + in_block, head = static_cast<int>(blockIdx.y);
  const bool real = column < a.dim;
  const StepTokens s = step_tokens(a.state, static_cast<int>(blockIdx.z));
  const int64_t shared_at = static_cast<int64_t>(head / a.sharing) * a.n;
  const int64_t own_at = static_cast<int64_t>(head) * a.dim;
  const int64_t in_state = own_at * a.n + static_cast<int64_t>(slice) * kSliceRows * a.dim + column;
  const float d = a.d != nullptr ? a.d[head] : 0.0f;
  wait();
  float h[kSliceRows];
  const int mine = min(kSliceRows, a.n - slice * kSliceRows);  // rows of this thread, may be < 0
  {
    const float* from = state_at(a.state, s.slot) + in_state;
#pragma unroll
    for (int r = 0; r < kSliceRows; ++r, from += a.dim) {
      h[r] = !s.begins && real && r < mine ? *from : 0.0f;
    }
  }
  const auto save = [&](int slot) {
    if (!real) return;
    float* to = state_at(a.state, slot) + in_state;
#pragma unroll
    for (int r = 0; r < kSliceRows; ++r, to += a.dim) {
      if (r < mine) *to = h[r];
    }
  };
  if (a.n < kSlices * kSliceRows) {  // rows of shared memory beyond n stay zero
    constexpr int kRoom = kScanTokens * kSlices * kSlicePad;
    for (int i = thread; i < 2 * kRoom; i += threads) {
      (&rooms[i / kRoom].b[0][0])[i % kRoom] = 0.0f;
      (&rooms[i / kRoom].c[0][0])[i % kRoom] = 0.0f;
    }
    __syncthreads();
  }
  // A warp fetches a token at a time.
  const int warp = thread / 32, warps = threads / 32;
  const auto fetch = [&](int t, Room& to) {
    for (int i = warp; i < min(kScanTokens, s.last - t); i += warps) {
      const float* const b = a.b.data + (t + i) * a.b.stride + shared_at;
      const float* const c = a.c.data + (t + i) * a.c.stride + shared_at;
      const float* const x = a.x.data + (t + i) * a.x.stride + own_at + first_column;
#pragma unroll
      for (int part = 0; part < kSlices; ++part) {
        if (part * kSliceRows + lane >= a.n) break;
        cp_async_number(&to.b[i][part * kSlicePad + lane], b + part * kSliceRows + lane);
        cp_async_number(&to.c[i][part * kSlicePad + lane], c + part * kSliceRows + lane);
      }
      for (int col = lane; col < min(columns, a.dim - first_column); col += 32) {
        cp_async_number(&to.x[i][col], x + col);
      }
      if (lane != 0) continue;
      if (a.dt.data != nullptr) {
        cp_async_number(&to.dt[i], a.dt.data + (t + i) * a.dt.stride + head);
      }
      if (kDelta) cp_async_number(&to.beta[i], a.beta.data + (t + i) * a.beta.stride + head);
    }
  };
  fetch(s.first, rooms[0]);
  cp_async_commit();
  int buffer = 0;
  for (int t = s.first; t < s.last; t += kScanTokens, buffer ^= 1) {
    cp_async_wait<0>();
    // These tokens have arrived, and all threads have finished with the previous ones.
    __syncthreads();
    if (t + kScanTokens < s.last) fetch(t + kScanTokens, rooms[buffer ^ 1]);
    cp_async_commit();
    Room& from = rooms[buffer];
    const int count = min(kScanTokens, s.last - t);
    for (int i = warp; i < count && lane == 0; i += warps) {
      from.steps[i] = step_of<kDelta>(a, head, from.dt[i], from.beta[i]);
    }
    __syncthreads();
    for (int i = 0; i < count; ++i) {
      const float x = real ? from.x[i][in_block] : 0.0f;
      const float sum = advance<kSlices, kDelta>(h, from.b[i] + slice * kSlicePad,
                                                 from.c[i] + slice * kSlicePad, x, from.steps[i]);
      if (real && slice == 0) {
        a.out.data[(t + i) * a.out.stride + own_at + column] =
            a.d != nullptr ? __fmaf_rn(d, x, sum) : sum;
      }
      if (const int slot = saved_at(a.state, t + i); slot >= 0) save(slot);
    }
  }
  save(s.slot);
}

// Divides queries and keys by their L2 norms, and queries by the square root of their size. A warp
// has one head of one token. Grid: [token, heads of both].
constexpr int kLengthWarps = 4;

__global__ void __launch_bounds__(kLengthWarps * 32)
    unit_heads_kernel(Rows q, Rows k, int heads, int dim) {
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int h = static_cast<int>(blockIdx.y) * kLengthWarps + static_cast<int>(threadIdx.x / 32);
  if (h >= 2 * heads) return;
  const bool query = h < heads;
  const Rows& of = query ? q : k;
  float* const x = of.data + blockIdx.x * of.stride + static_cast<int64_t>(h % heads) * dim;
  wait();
  float sum = 0.0f;
  for (int i = lane; i < dim; i += 32) sum = __fmaf_rn(x[i], x[i], sum);
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, apart));
  }
  float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(sum, 1e-6f)));
  if (query) scale = __fmul_rn(scale, __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(dim))));
  for (int i = lane; i < dim; i += 32) x[i] = __fmul_rn(x[i], scale);
}

template <int kSlices, bool kDelta>
int run_scan(const Context& ctx, const ScanArgs& a) {
  constexpr int kColumnsOfWarp = 32 / kSlices;
  const auto kernel = scan_kernel<kSlices, kDelta>;
  const size_t room = 2 * sizeof(ScanRoom<kSlices>);
  if (const int error = raise_shared(kernel, room); error != 0) return error;
  const int64_t all = ceil_div(a.dim, kColumnsOfWarp);
  const int64_t warps = all < kMostScanWarps ? all : kMostScanWarps;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.dim, warps * kColumnsOfWarp)),
                  static_cast<unsigned>(a.heads), static_cast<unsigned>(a.state.sequences));
  return launch(ctx, kernel, grid, dim3(static_cast<unsigned>(warps * 32)), room, a);
}

template <bool kDelta>
int run_scan(const Context& ctx, const ScanArgs& a) {
  if (a.n <= kSliceRows) return run_scan<1, kDelta>(ctx, a);
  if (a.n <= 2 * kSliceRows) return run_scan<2, kDelta>(ctx, a);
  if (a.n <= 4 * kSliceRows) return run_scan<4, kDelta>(ctx, a);
  if (a.n <= 8 * kSliceRows) return run_scan<8, kDelta>(ctx, a);
  return run_scan<16, kDelta>(ctx, a);
}

}  // namespace

int linear_scan(const Context& ctx, const LinearScanArgs* args) {
  const LinearScanArgs& l = *args;
  return run_scan<false>(ctx, {l.x,
                               l.out,
                               l.b,
                               l.c,
                               l.dt,
                               {},
                               l.dt_bias,
                               l.a,
                               l.d,
                               l.dt_min,
                               l.dt_max,
                               l.heads,
                               l.head_dim,
                               l.heads / l.groups,
                               l.n,
                               l.state});
}

int delta_scan(const Context& ctx, const DeltaScanArgs* args) {
  const DeltaScanArgs& s = *args;
  const dim3 grid(static_cast<unsigned>(s.q.rows),
                  static_cast<unsigned>(ceil_div(2 * s.key_heads, kLengthWarps)));
  if (const int error = launch(ctx, unit_heads_kernel, grid, dim3(kLengthWarps * 32), 0, s.q, s.k,
                               s.key_heads, s.key_dim);
      error != 0) {
    return error;
  }
  return run_scan<true>(
      ctx, {s.v, s.out, s.k, s.q, s.alpha, s.b, s.dt_bias, s.a, nullptr, 0.0f, 0.0f, s.value_heads,
            s.value_dim, s.value_heads / s.key_heads, s.key_dim, s.state});
}

}  // namespace freshet::cuda

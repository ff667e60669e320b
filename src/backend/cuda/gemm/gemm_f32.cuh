// F32 GEMM, used for routers: a warp computes one row of the weights for one token. Lane l sums
// columns 4 l to 4 l + 3 of every 128 in ascending order, and a butterfly adds the lanes: the same
// bits for every number of tokens.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"

namespace freshet::cuda {

// A row of weights in pieces of 128 columns, of which a lane has four floats.
struct F32Row {
  const float* data;
  int64_t cols, padded;
  __device__ F32Row(const WeightView& w, int64_t row)
      : data(reinterpret_cast<const float*>(w.data + tile_at<F32>(row / 16, w.cols)) +
             row % 16 * 64),
        cols(w.cols),
        padded((w.cols + 63) / 64 * 64) {}
  __device__ __forceinline__ float4 at(int64_t piece) const {
    const int64_t col = piece * 128 + threadIdx.x % 32 * 4;
    if (col >= padded) return {};
    return __ldg(reinterpret_cast<const float4*>(data + col / 64 * 1024 + col % 64));
  }
};
// Whether rows of activations are multiples of four floats.
__host__ __device__ inline bool f32_aligned(const ProductArgs& p) {
  return p.weight.cols % 4 == 0 && p.x_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
}
// Four floats of a token, from column `col` on.
template <bool kAligned>
__device__ __forceinline__ float4 f32_four(const float* x, int64_t cols, int64_t col) {
  float4 v = {};
  if constexpr (kAligned) {
    if (col < cols) v = *reinterpret_cast<const float4*>(x + col);
  } else {
    if (col < cols) v.x = x[col];
    if (col + 1 < cols) v.y = x[col + 1];
    if (col + 2 < cols) v.z = x[col + 2];
    if (col + 3 < cols) v.w = x[col + 3];
  }
  return v;
}
template <bool kAligned>
__device__ __forceinline__ float4 f32_token(const float* x, int64_t cols, int64_t piece) {
  return f32_four<kAligned>(x, cols, piece * 128 + threadIdx.x % 32 * 4);
}
__device__ __forceinline__ float f32_add(float sum, const float4& w, const float4& x) {
  sum = __fmaf_rn(w.x, x.x, sum);
  sum = __fmaf_rn(w.y, x.y, sum);
  sum = __fmaf_rn(w.z, x.z, sum);
  return __fmaf_rn(w.w, x.w, sum);
}
__device__ __forceinline__ float f32_lanes(float sum) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, step));
  }
  return sum;
}
// Finishes and writes a row's sum.
__device__ __forceinline__ float f32_ended(const ProductArgs& p, int64_t row, float v) {
  if (p.bias != nullptr) v = __fadd_rn(v, p.bias[row]);
  return __fmul_rn(v, p.scale);
}
__device__ __forceinline__ void f32_put(const ProductArgs& p, int64_t token, int64_t row, float v) {
  v = f32_ended(p, row, v);
  float* to = p.out + token * p.out_stride + row;
  *to = p.add != 0 ? __fadd_rn(*to, v) : v;
}

// A warp's row for a token. Loads its first weights before it waits for the previous kernel. Every
// warp of a block must call this.
template <bool kAligned>
__device__ __forceinline__ void f32_row(const ProductArgs& p, int64_t row, int64_t token) {
  constexpr int kHeld = 16;
  const int64_t cols = p.weight.cols, pieces = (cols + 127) / 128;
  const bool works = row < p.weight.rows;
  const F32Row w(p.weight, works ? row : 0);
  float4 held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = w.at(i);
  wait();
  if (!works) return;
  const float* x = p.x + token * p.x_stride;
  float sum = 0.0f;
#pragma unroll 1
  for (int64_t base = 0; base < pieces; base += kHeld) {
    float4 v[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) v[i] = f32_token<kAligned>(x, cols, base + i);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      sum = f32_add(sum, base == 0 ? held[i] : w.at(base + i), v[i]);
    }
  }
  sum = f32_lanes(sum);
  if (threadIdx.x % 32 == 0) f32_put(p, token, row, sum);
}

// A warp's kF32Side rows by as many tokens, with rows that are multiples of four. Three pieces are
// in flight while one is added.
inline constexpr int kF32Side = 4;
__device__ __forceinline__ void f32_square(const ProductArgs& p, int64_t row, int64_t token,
                                           int64_t tokens) {
  constexpr int kSide = kF32Side, kHeld = 4;
  const int64_t cols = p.weight.cols, pieces = (cols + 127) / 128;
  const bool works = row < p.weight.rows && token < tokens;
  const F32Row rows(p.weight, works ? row : 0);  // rows of a 16-row tile are 64 floats apart
  float4 w[kHeld][kSide], x[kHeld][kSide];
  const auto load_w = [&](float4(&to)[kSide], int64_t piece) {
#pragma unroll
    for (int r = 0; r < kSide; ++r) {
      F32Row of = rows;
      of.data += r * 64;
      to[r] = of.at(piece);
    }
  };
  const auto load_x = [&](float4(&to)[kSide], int64_t piece) {
#pragma unroll
    for (int t = 0; t < kSide; ++t) {
      const int64_t at = token + t < tokens ? token + t : tokens - 1;
      to[t] = f32_token<true>(p.x + at * p.x_stride, cols, piece);
    }
  };
#pragma unroll
  for (int n = 0; n < kHeld - 1; ++n) load_w(w[n], n);
  wait();
  if (!works) return;
#pragma unroll
  for (int n = 0; n < kHeld - 1; ++n) load_x(x[n], n);
  float sum[kSide][kSide] = {};
#pragma unroll 1
  for (int64_t first = 0; first < pieces; first += kHeld) {
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {  // zeros beyond the last piece
      load_w(w[(n + kHeld - 1) % kHeld], first + n + kHeld - 1);
      load_x(x[(n + kHeld - 1) % kHeld], first + n + kHeld - 1);
#pragma unroll
      for (int r = 0; r < kSide; ++r) {
#pragma unroll
        for (int t = 0; t < kSide; ++t) sum[r][t] = f32_add(sum[r][t], w[n][r], x[n][t]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
#pragma unroll
    for (int t = 0; t < kSide; ++t) {
      const float v = f32_lanes(sum[r][t]);
      if (threadIdx.x % 32 == 0 && row + r < p.weight.rows && token + t < tokens) {
        f32_put(p, token + t, row + r, v);
      }
    }
  }
}
// gemm_f32.cu: one warp per row and token, for few tokens or unaligned rows; squares of rows and
// tokens; tiles in shared memory. The latter two support aligned rows only.
int run_f32(const Context& ctx, const ProductList& list, int64_t tokens);
int run_f32_squares(const Context& ctx, const ProductList& list, int64_t tokens);
int run_f32_many(const Context& ctx, const ProductList& list, int64_t tokens);

}  // namespace freshet::cuda

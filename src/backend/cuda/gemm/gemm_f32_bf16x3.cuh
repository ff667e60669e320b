// F32 GEMM with weights that are exact in BF16, as published routers are. x is the sum of three
// BF16 values, so three tensor-core multiplications give the F32 product.
//
// K is processed in chunks of 64 columns. A chunk's sum is one tensor-core accumulation chain that
// starts with the least significant parts of x, and chunks are added in order: the same bits for
// every number of tokens, and no farther from the exact sum than gemm_f32.cuh.
#pragma once

#include "backend/cuda/gemm/gemm_f32.cuh"

namespace freshet::cuda {

// Tiles of 16 rows as in BF16, with columns permuted so that a lane's operand of mma.m16n8k16 has
// four adjacent columns of 16.
struct ExactF32 : BF16 {
  static constexpr Code kCode = Code::kExactF32;
  static constexpr int kBytes = 4;
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int row = i / 64, col = i % 64;
      const int to = col / 16 * 16 + col % 4 / 2 * 8 + col % 16 / 4 * 2 + col % 2;
      reinterpret_cast<uint16_t*>(tile)[place(row, to)] =
          rows[row] != nullptr && col < left
              ? reinterpret_cast<const uint16_t*>(rows[row])[col * 2 + 1]
              : 0;
    }
  }
};
inline constexpr int kParts = 3, kChunk = 64, kSteps = kChunk / 16;

// The BF16 parts of two adjacent floats, least significant first.
__device__ __forceinline__ void split(float low, float high, uint32_t (&to)[kParts]) {
#pragma unroll
  for (int part = kParts - 1; part >= 0; --part) {
    const uint32_t l = __float_as_uint(low), h = __float_as_uint(high);
    to[part] = __byte_perm(l, h, 0x7632);
    if (part == 0) continue;
    low = __fsub_rn(low, __uint_as_float(l & 0xffff0000));
    high = __fsub_rn(high, __uint_as_float(h & 0xffff0000));
  }
}

constexpr int kChunksAtOnce = 32;
using ChunkSums = float[kChunksAtOnce][16 * kTokenTile];  // of a block, in shared memory

// A block's 16 rows for 8 tokens, kEach chunks per warp at a time. The first weights are loaded
// before the previous kernel ends.
template <bool kAligned, int kEach = kChunksAtOnce / kWarps>
__device__ __forceinline__ void exact_tile(const ProductArgs& p, int64_t tile, int64_t first_token,
                                           int64_t tokens, ChunkSums& sums) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t cols = p.weight.cols, chunks = ceil_div(cols, kChunk);
  const auto* weights =
      reinterpret_cast<const uint32_t*>(p.weight.data + tile_at<ExactF32>(tile, cols)) + lane;
  uint4 w[kEach][kSteps];
  const auto load_weights = [&](int64_t base) {
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      const int64_t chunk = base + warp * kEach + c;
      const uint32_t* from = weights + chunk * (ExactF32::kTileBytes / 4);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const auto core = [&](int rows, int half) {
          return chunk < chunks ? __ldg(from + (rows * 8 + k * 2 + half) * 32) : 0;
        };
        w[c][k] = make_uint4(core(0, 0), core(1, 0), core(0, 1), core(1, 1));
      }
    }
  };
  load_weights(0);
  wait();
  const bool real = first_token + lane / 4 < tokens;
  const float* x = p.x + (first_token + lane / 4) * p.x_stride;
  float total = -0.0f;  // the identity of addition
  for (int64_t base = 0; base < chunks; base += kChunksAtOnce) {
    float4 v[kEach][kSteps];
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int64_t col = (base + warp * kEach + c) * kChunk + k * 16 + lane % 4 * 4;
        v[c][k] = real ? f32_four<kAligned>(x, cols, col) : float4{};
      }
    }
    if (base > 0) load_weights(base);
#pragma unroll
    for (int c = 0; c < kEach; ++c) {
      uint32_t b[kSteps][2][kParts];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        split(v[c][k].x, v[c][k].y, b[k][0]);
        split(v[c][k].z, v[c][k].w, b[k][1]);
      }
      float sum[4] = {};
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) mma(sum, w[c][k], b[k][0][part], b[k][1][part]);
      }
      *reinterpret_cast<float4*>(&sums[warp * kEach + c][lane * 4]) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    const auto count =
        static_cast<int>(chunks - base < kChunksAtOnce ? chunks - base : kChunksAtOnce);
    if (thread < 16 * kTokenTile) {
#pragma unroll 8
      for (int c = 0; c < count; ++c) total = __fadd_rn(total, sums[c][thread]);
    }
    if (base + kChunksAtOnce < chunks) __syncthreads();
  }
  const int64_t row = tile * 16 + thread % 4 / 2 * 8 + thread / 16;
  const int64_t token = first_token + thread / 4 % 4 * 2 + thread % 2;
  if (thread < 16 * kTokenTile && row < p.weight.rows && token < tokens) {
    f32_put(p, token, row, total);
  }
}

// gemm_f32_bf16x3.cu
int run_exact(const Context& ctx, const ProductArgs& product, int64_t tokens);
int run_exact_many(const Context& ctx, const ProductArgs& product,
                   int64_t tokens);  // aligned, on Hopper

}  // namespace freshet::cuda

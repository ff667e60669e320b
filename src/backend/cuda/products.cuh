// What the kernels of products share: how K is cut, the epilogue, and the sum of a piece of 64
// columns. They differ in who computes what; the order of a sum is the same in all of them.
#pragma once

#include "backend/cuda/formats.cuh"

namespace freshet::cuda {

inline constexpr int kWarps = 8;

// How many parts K is cut into: eight, as long as a part has 256 columns, so that a block of eight
// warps reads one tile of rows from end to end.
__host__ __device__ inline int leaves(int64_t cols) {
  return cols >= 2048 ? 8 : cols >= 1024 ? 4 : cols >= 512 ? 2 : 1;
}

struct ProductList {
  ProductArgs of[kMaxProducts];
  int32_t first_block[kMaxProducts + 1];
  int32_t count;
};

// A list in which each block takes so many rows.
inline ProductList with_blocks(ProductList list, int64_t rows) {
  for (int i = 0; i < list.count; ++i) {
    const int64_t blocks = ceil_div(list.of[i].weight.rows, rows);
    list.first_block[i + 1] = list.first_block[i] + static_cast<int32_t>(blocks);
  }
  return list;
}

// What a block needs to know of its product.
struct Work {
  const uint8_t* weights;
  int64_t rows, cols;
  const uint8_t* act;
  int64_t act_chunks, act_tiles;
  float* out;
  int64_t out_stride, tokens;
  const float* bias;
  float scale;
  bool add;
};

// Writes the sums of 16 rows for NT tiles of tokens; loads of what is added to fly together.
template <int NT>
__device__ __forceinline__ void finish(const Work& w, const float (&sum)[NT][4], int64_t row_tile,
                                       int64_t token_tile, int lane) {
  constexpr int kAtOnce = NT % 2 == 0 ? 2 : 1;
  const int64_t row = row_tile * 16 + lane / 4, token = token_tile * 8 + lane % 4 * 2;
  const bool real[2] = {row < w.rows, row + 8 < w.rows};
  float bias[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (w.bias != nullptr && real[r]) bias[r] = w.bias[row + r * 8];
  }
  float* at = w.out + token * w.out_stride + row;
  int64_t left = w.tokens - token;
#pragma unroll
  for (int first = 0; first < NT; first += kAtOnce) {
    const auto each = [&](auto&& body) {
#pragma unroll
      for (int n = 0; n < kAtOnce * 4; ++n) {
        const int to = n / 4 * 8 + n % 2, r = n % 4 / 2;
        if (to < left && real[r]) body(n, r, at + to * w.out_stride + r * 8);
      }
    };
    float before[kAtOnce * 4];
    if (w.add) each([&](int n, int, const float* from) { before[n] = *from; });
    each([&](int n, int r, float* to) {
      float v = sum[first + n / 4][n % 4];
      if (w.bias != nullptr) v = __fadd_rn(v, bias[r]);
      v = __fmul_rn(v, w.scale);
      *to = w.add ? __fadd_rn(before[n], v) : v;
    });
    at += kAtOnce * 8 * w.out_stride;
    left -= kAtOnce * 8;
  }
}

// sum += a piece of 64 columns: a is its four operands, b the tokens'.
template <class F, int NT>
__device__ __forceinline__ void accumulate(float (&sum)[NT][4], const uint4 (&a)[4],
                                           const uint4 (&b)[NT][2], const Piece& piece, int index) {
  if constexpr (F::kGroup == 0) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      mma(sum[j], a[0], b[j][0].x, b[j][0].y);
      mma(sum[j], a[1], b[j][0].z, b[j][0].w);
      mma(sum[j], a[2], b[j][1].x, b[j][1].y);
      mma(sum[j], a[3], b[j][1].z, b[j][1].w);
    }
  } else {
    constexpr uint32_t kOne = 0x3f803f80;
#pragma unroll
    for (int group = 0; group < 4 / F::kGroup; ++group) {
      const Scales s = F::scales(piece, index, group);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        float part[4] = {}, ones[4] = {};
#pragma unroll
        for (int k = group * F::kGroup; k < (group + 1) * F::kGroup; ++k) {
          const uint4& v = b[j][k / 2];
          mma(part, a[k], k % 2 == 0 ? v.x : v.z, k % 2 == 0 ? v.y : v.w);
          if constexpr (F::kMins) {
            mma(ones, make_uint4(kOne, kOne, kOne, kOne), k % 2 == 0 ? v.x : v.z,
                k % 2 == 0 ? v.y : v.w);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[j][i] = __fmaf_rn(part[i], i < 2 ? s.d0 : s.d1, sum[j][i]);
          if constexpr (F::kMins) {
            sum[j][i] = __fmaf_rn(-ones[i], i < 2 ? s.m0 : s.m1, sum[j][i]);
          }
        }
      }
    }
  }
}

// Up to so many tokens streams of weights are faster than tiles, and want activations in the order
// of lanes.
inline constexpr int64_t kFewTokens = 64;

// products_tile.cu: many tokens.
template <class F>
int run_tiles(const ProductList& list, int64_t tokens);

// products_few.cu: BF16 on Hopper, few tokens in the order of lanes.
bool few_takes(const ProductList& list, int64_t tokens);
int run_few(const ProductList& list, int64_t tokens);

// products_wgmma.cu: BF16 on Hopper.
bool wgmma_takes(Code code, int64_t tokens);
int run_wgmma(const ProductList& list, int64_t tokens);

// products_fp8.cu: FP8 on Hopper.
int run_fp8(const ProductList& list, int64_t tokens);

}  // namespace freshet::cuda

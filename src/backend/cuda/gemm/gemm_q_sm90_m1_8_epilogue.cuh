// Shared by the GEMMs with quantised weights for up to eight tokens: how a warp iterates over its
// split-K slice, and the epilogue of a tile, whose addresses are computed before the sums are
// ready.
#pragma once

#include <utility>

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"

namespace freshet::cuda {

// Slice sizes in pieces of 64 columns for which the code is unrolled, if all slices have the same
// size: K of 4,096, 2,560, 3,072, 3,584 and 5,120.
using UsualLeaves = std::integer_sequence<int, 8, 5, 6, 7, 10>;

// The most pieces of a pipeline stage.
inline constexpr int kStagePieces = 4;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ int product_of(const ProductList& list, int index) {
  int i = 0;
  while (i + 1 < list.count && index >= list.first_block[i + 1]) ++i;
  return i;
}

// Forces an address to be computed here, not where it is used.
template <class T>
__device__ __forceinline__ T* known(T* p) {
  size_t at = __cvta_generic_to_global(p);
  asm volatile("" : "+l"(at));
  return static_cast<T*>(__cvta_global_to_generic(at));
}

// Forces a value to be computed here, not where it is used.
__device__ __forceinline__ void keep(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}

// A warp's slice for any number of columns, in units of the format, processed in pipeline stages of
// two to kStagePieces pieces. If stages cannot all be of one size, the first ones are a unit
// longer.
template <class F>
struct LeafWalk {
  static constexpr int kPieces = F::kUnit / 64, kMost = kStagePieces / kPieces;
  static_assert(kPieces * kMost == kStagePieces);
  int first, units, stages, each, longer;
  __device__ __forceinline__ LeafWalk(int64_t cols, int leaf) {
    const int all = static_cast<int>((cols + F::kUnit - 1) / F::kUnit);
    first = all * leaf / kWarps;
    units = all * (leaf + 1) / kWarps - first;
    stages = (units + kMost - 1) / kMost;
    each = kMost == 1 ? 1 : units / stages;
    longer = kMost == 1 ? 0 : units - each * stages;
  }
  // Units in a stage.
  __device__ __forceinline__ int count(int stage) const { return each + (stage < longer ? 1 : 0); }
};

// A lane's activations of the next two pieces; after the last piece of a slice, of its first two
// again.
struct TokenPair {
  const uint4* act;  // at the slice's beginning
  uint4 b[2][1][2];
  __device__ __forceinline__ void load(int i, int piece) {
    const uint4* at = act + piece * 64;
    b[i][0][0] = at[0];
    b[i][0][1] = at[32];
  }
  __device__ __forceinline__ void swap() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 first = b[0][0][i];
      b[0][0][i] = b[1][0][i];
      b[1][0][i] = first;
    }
  }
};

// sum += one stage: `pieces` pieces of a slice from piece `at` on, whose weights are at `tiles`. On
// entry `tokens` holds the stage's first two pieces, on return the two from piece `next` on.
template <class F>
__device__ __forceinline__ void add_stage(float (&sum)[1][4], TokenPair& tokens,
                                          const uint8_t* tiles, int pieces, int at, int next,
                                          int lane) {
  constexpr int kPieces = F::kUnit / 64;
  const auto take = [&](int i) {
    Piece piece;
    uint4 a[4];
    F::template load<FromShared>(tiles + i / kPieces * F::kTileBytes, i % kPieces, lane, piece);
    F::decode(piece, i % kPieces, lane, a);
    accumulate<F, 1>(sum, a, tokens.b[i % 2], piece, i % kPieces);
  };
  const auto take_all = [&](auto all) {
    constexpr int kCount = decltype(all)::value;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      take(i);
      tokens.load(i % 2, i + 2 < kCount ? at + i + 2 : next + i + 2 - kCount);
    }
    if constexpr (kCount % 2 != 0) tokens.swap();
  };
  if (kPieces == kStagePieces || pieces == 4) return take_all(std::integral_constant<int, 4>{});
  if constexpr (kPieces == 1) {
    if (pieces == 3) return take_all(std::integral_constant<int, 3>{});
  }
  if constexpr (kPieces < kStagePieces) take_all(std::integral_constant<int, 2>{});
}

// The sum of eight slices, from left to right.
__device__ __forceinline__ void add_leaves(float (&all)[4], const float4 (&sums)[kWarps][32]) {
#pragma unroll
  for (int l = 0; l < kWarps; ++l) {
    const float4 part = sums[l][threadIdx.x % 32];
    const float each[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) all[n] = l == 0 ? each[n] : __fadd_rn(all[n], each[n]);
  }
}

// Where a lane's sums of a tile go, computed before the sums are ready.
struct End {
  float* to;
  const float* bias;
  int64_t stride;
  float scale;
  uint32_t real;  // bit n: element n is in bounds; bit 4: add to the old value

  __device__ __forceinline__ End(const ProductList& list, int i, int64_t row_tile, int lane,
                                 int64_t tokens) {
    const ProductArgs& p = list.of[i];
    const int64_t row = row_tile * 16 + lane / 4;
    const int token = lane % 4 * 2;
    to = known(p.out + token * p.out_stride + row);
    bias = p.bias + (p.bias == nullptr ? 0 : row);
    stride = p.out_stride;
    scale = p.scale;
    real = p.add != 0 ? 16 : 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row + n / 2 * 8 < p.weight.rows && token + n % 2 < tokens) real |= 1u << n;
    }
    asm volatile("" : "+l"(stride), "+f"(scale), "+r"(real));
  }
  __device__ __forceinline__ float* at(int n) const { return to + n % 2 * stride + n / 2 * 8; }
  __device__ __forceinline__ void load(float (&before)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((real >> n & 1) != 0) before[n] = *at(n);
    }
  }
  // Same result as finish().
  __device__ __forceinline__ void put(const float (&sum)[4], const float (&before)[4],
                                      float up) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if ((real >> n & 1) == 0) continue;
      float v = __fmul_rn(sum[n], up);
      if (bias != nullptr) v = __fadd_rn(v, bias[n / 2 * 8]);
      v = __fmul_rn(v, scale);
      *at(n) = real >= 16 ? __fadd_rn(before[n], v) : v;
    }
  }
};
#endif

}  // namespace freshet::cuda

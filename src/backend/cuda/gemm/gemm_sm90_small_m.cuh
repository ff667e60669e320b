// Shared by the GEMMs for few tokens on Hopper, for any weight format. A block gets an even share
// of the 16-row tiles. kPair of its warps sum a split-K slice, R tiles at a time, each from its own
// pipeline; slices are added from left to right in shared memory, which follows the pipelines.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {

// A block's row tiles.
struct Share {
  int64_t first;
  int count;
};

// NT: tiles of 8 tokens; R: row tiles of a warp at once; kPair: warps per slice.
template <int NT_, int R_, int kPair_ = 1>
struct FewSums {
  static constexpr int NT = NT_, R = R_, kPair = kPair_;
  static constexpr int kTiles = R * kPair, kAllWarps = kWarps * kPair;
  static constexpr int kTogether =  // token tiles added at once
      kTiles * NT <= kAllWarps ? NT : kAllWarps / kTiles;
  static constexpr int kItems = kTiles * kTogether;
  static constexpr int kSumBytes = kWarps * kItems * 32 * 16;
  static_assert(NT % kTogether == 0 && kItems <= kAllWarps);
};

// Pipelines of at most kMost stages, in the shared memory that the sums leave free.
template <class Sums, int kStageBytes_, int kMost = 1 << 10>
struct FewRings {
  static constexpr int kStageBytes = kStageBytes_;
  static constexpr int kFit = ((224 << 10) - Sums::kSumBytes) / (Sums::kAllWarps * kStageBytes);
  static constexpr int kStages = kFit < kMost ? kFit : kMost;
  static constexpr int kRings = Sums::kAllWarps * kStages * kStageBytes;
  static constexpr int kBytes = kRings + Sums::kSumBytes;
  static_assert(kStages >= 2);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Adds up the slices of a group's sums. A warp takes all partial sums of an item and calls end(sum,
// tile, token tile, round); it has one item in every round.
template <class S, class End>
__device__ __forceinline__ void add_leaves(const float (&sum)[S::R][S::NT][4], float4* shared,
                                           int tiles, const End& end) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int first = warp / S::kPair * S::kItems + warp % S::kPair * S::R;
#pragma unroll
  for (int j = 0; j < S::NT; j += S::kTogether) {
    __syncthreads();  // the previous sums have been read
#pragma unroll
    for (int i = 0; i < S::R * S::kTogether; ++i) {
      const float(&v)[4] = sum[i % S::R][j + i / S::R];
      shared[(first + i / S::R * S::kTiles + i % S::R) * 32 + lane] =
          make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    if (warp >= S::kItems || warp % S::kTiles >= tiles) continue;
    float all[1][4];
#pragma unroll
    for (int leaf = 0; leaf < kWarps; ++leaf) {
      const float4 v = shared[(leaf * S::kItems + warp) * 32 + lane];
      const float part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        all[0][n] = leaf == 0 ? part[n] : __fadd_rn(all[0][n], part[n]);
      }
    }
    end(all, warp % S::kTiles, j + warp / S::kTiles, j / S::kTogether);
  }
}
template <class S>
__device__ __forceinline__ void add_leaves(const Work& w, const float (&sum)[S::R][S::NT][4],
                                           float4* shared, int64_t tile, int tiles) {
  add_leaves<S>(sum, shared, tiles, [&](const float(&all)[1][4], int t, int j, int) {
    finish<1>(w, all, tile + t, j, static_cast<int>(threadIdx.x % 32));
  });
}
#endif

template <class S, class Kernel>
int launch_shares(const Context& ctx, Kernel kernel, const ProductList& list, int64_t tokens,
                  int share) {
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(list.first_block[list.count])),
                dim3(S::kAllWarps * 32), S::kBytes, list, tokens, share);
}

}  // namespace freshet::cuda

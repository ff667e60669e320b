// What the products of FP8 weights on Hopper share: how K is cut.
#pragma once

#include "backend/cuda/products.cuh"
#include "backend/cuda/wgmma8.cuh"

namespace freshet::cuda {

inline constexpr int kPanelRows = 64;
inline constexpr int kPanelBytes = static_cast<int>(kUnitStep<FP8>);

// Weights of so many rows that tiles of 128 of them keep two thirds of 132 multiprocessors busy
// until the end: K need not be cut, and a block has room for sums of twice as many rows.
__host__ __device__ inline bool whole_in_k(int64_t rows) {
  constexpr int64_t kTile = 2 * kPanelRows, kBlocks = 132;
  const int64_t tiles = (rows + kTile - 1) / kTile, turns = (tiles + kBlocks - 1) / kBlocks;
  return tiles * 3 >= turns * kBlocks * 2;
}
__host__ __device__ inline int leaves8(const WeightView& w) {
  if (whole_in_k(w.rows)) return 1;
  return w.cols >= 2048 ? 4 : w.cols >= 1024 ? 2 : 1;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Leaf {
  int first, count;  // steps of 128 columns
};
__device__ __forceinline__ Leaf leaf_of(const WeightView& w, int leaf) {
  const int steps = static_cast<int>((w.cols + kE4M3Cols - 1) / kE4M3Cols), parts = leaves8(w);
  const int first = steps * leaf / parts;
  return {first, steps * (leaf + 1) / parts - first};
}

// The tiles of a block, or of a cluster of two that share rows: the blocks' tokens are neighbours.
struct Tour {
  int first, step, tiles;
  int blocks = 1, rank = 0;
};

// The same in all lanes, and known to be: what depends on it is computed once a warp. Or else the
// places of operands are computed by each lane, and moved to where wgmma wants them.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x / 32), 0);
}
#endif

// products_fp8_many.cu: more than 64 tokens; up to so many, where all multiprocessors have tiles of
// 128 rows until the end.
int run_fp8_many(const ProductList& list, int64_t tokens);
bool fp8_wide_fits(const ProductList& list, int64_t tokens);
int run_fp8_wide(const ProductList& list, int64_t tokens);

// products_fp8_halves.cu: 65 to 128 tokens. How many tiles of 8 rows a cluster takes; 0: clusters
// for all rows would not run at once, or there is one leaf only.
int fp8_halves_tiles(const ProductList& list, int64_t tokens);
int run_fp8_halves(const ProductList& list, int64_t tokens);

}  // namespace freshet::cuda

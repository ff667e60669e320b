// Shared by the FP8 GEMMs on Hopper: how K is cut into slices.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/mma/wgmma_fp8.cuh"

namespace freshet::cuda {

inline constexpr int kPanelRows = FP8Panels::kRows;
// A K step of a panel: its codes, then its scales.
inline constexpr int kPanelBytes = FP8Panels::kStepBytes, kPanelCodes = FP8Panels::kCodes;
inline constexpr int kTileCodes = kTokenTile * kE4M3Cols, kTileScales = kTokenTile * 4;

static_assert(kPanelRows == 64 && kPanelBytes == 8448);  // gemm_fp8_sm90_m1_64.h
__host__ __device__ inline int leaves8(const WeightView& w) {
  return fp8_leaves(w.rows, w.cols);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Fp8Slice {
  int first, count;  // steps of 128 columns
};
// How the K steps of a weight are cut into slices. The number of slices is a power of two, so that
// a shift does the division.
struct LeafCut {
  int steps, shift;
  __device__ __forceinline__ Fp8Slice leaf(int which) const {
    const int first = steps * which >> shift;
    return {first, (steps * (which + 1) >> shift) - first};
  }
};
__device__ __forceinline__ LeafCut leaf_cut(const WeightView& w) {
  return {static_cast<int>((w.cols + kE4M3Cols - 1) / kE4M3Cols), leaves8(w) >> 1};
}
__device__ __forceinline__ Fp8Slice leaf_of(const WeightView& w, int leaf) {
  return leaf_cut(w).leaf(leaf);
}

// The tiles of a block, or of a cluster of two blocks that multiply the same rows with neighbouring
// tokens.
struct Tour {
  int first, step, tiles;
  int blocks = 1, rank = 0;
};

// Lower half of the matrix descriptor of an operand in shared memory; only this half differs from
// stage to stage.
__device__ __forceinline__ uint32_t kept_place(const void* shared) {
  return kept(static_cast<uint32_t>(operand_at(shared)));
}
// sum = 128 columns of 64 rows times NT tiles of 8 rows; complete after wgmma_wait(). kApart,
// kTilesApart: bytes from one tile of either operand to the next.
template <int kApart, int kTilesApart, int NT>
__device__ __forceinline__ void fp8_multiply(float (&sum)[NT][4], uint32_t a, uint32_t b) {
  const auto at = [](uint64_t apart, uint32_t low, int k) {
    return apart >> 4 << 32 | (low + static_cast<uint32_t>(k * kNextStep));
  };
  wgmma_begin();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma8(sum, at(kApart, a, k), at(kTilesApart, b, k), k > 0);
  wgmma_commit();
}
#endif

}  // namespace freshet::cuda

// Which kernel runs a GEMM: the tables for out = W x, and for gate and up with a SwiGLU epilogue.
//
// Everything here is a function of formats, sizes, tokens and the device's limits, so that the
// choice can be printed and tested without a GPU. A GEMM problem is a list of weights of one format
// (or two, for the rows named q_pair) that one launch multiplies by the same number of tokens. All
// kernels have the same order of sums, so the choice affects speed only (FP8 on Hopper splits K by
// the weight's size alone).
#pragma once

#include "backend/cuda/api.h"
#include "backend/cuda/runtime/kernel_row.h"
#include "base/host_device.h"

namespace freshet::cuda {

struct GemmWeight {
  Code code;
  int64_t rows, cols;
};

struct GemmProblem {
  int format = 0;  // of the first weight
  int64_t tokens = 0;
  int count = 0;
  GemmWeight of[kMaxProducts] = {};
  bool same_tokens = true;  // all weights read the same activations
  bool aligned = true;      // F32: rows of x are multiples of four numbers, 16-byte aligned

  void add(const GemmWeight& weight) {
    if (count == 0) format = static_cast<int>(weight.code);
    of[count++] = weight;
  }
};

using GemmRow = KernelRow<GemmProblem>;

// The rows, best first.
enum GemmKernel : int {
  kGemmPairM1_8,
  kGemmPairM9_16,
  kGemmPairM17_64,
  kGemmPairM65,
  kGemmQM1_8SmallN,
  kGemmQM1_8LongK,
  kGemmQM1_8LargeN,
  kGemmQM1_8,
  kGemmQM9_16LargeN,
  kGemmQM9_16,
  kGemmQM17_64SplitK8,
  kGemmQM17_64SplitK4,
  kGemmQM17_64LargeN,
  kGemmQM17_64,
  kGemmQM65SplitK4,
  kGemmQM65HalfTokens,
  kGemmQM65,
  kGemmBf16M1_32,
  kGemmBf16M33_128SplitK2,
  kGemmBf16M33_128Balanced,
  kGemmBf16M33,
  kGemmFp8M65_128SplitK2,
  kGemmFp8M1_64LargeN,
  kGemmFp8M1_128,
  kGemmFp8M65,
  kGemmInt8M1_32,
  kGemmInt8M33,
  kGemmInt8Sm80,
  kGemmBf16x3M513,
  kGemmBf16x3,
  kGemmF32M9_512,
  kGemmF32M513,
  kGemmF32,
  kGemmSm80SmallM,
  kGemmSm80LargeM,
  kGemmKernels
};
extern const GemmRow kGemmRows[kGemmKernels];

// Gate and up: two weights of one format and size.
enum SwigluKernel : int {
  kSwigluQM1_8LargeN,
  kSwigluQM1_8,
  kSwigluQM9_16,
  kSwigluQM17_64LargeN,
  kSwigluQM17_32Rows160,
  kSwigluQM17_32Rows96,
  kSwigluQM17_64,
  kSwigluQM65,
  kSwigluBf16M1_16,
  kSwigluBf16M17_32,
  kSwigluBf16M33_64,
  kSwigluBf16M65_128,
  kSwigluBf16M65,
  kSwigluFp8M1_64,
  kSwigluFp8M65,
  kSwigluInt8M33,
  kSwigluKernels
};
extern const GemmRow kSwigluRows[kSwigluKernels];

// The layout in which GEMMs with weights in a format read their tokens.
Order activation_order(const DeviceLimits& limits, Code code, int64_t tokens);

// Parts of the conditions; kernels assert that their own constants match.

// The number of split-K slices: eight if a slice then has at least 256 columns, so that the eight
// warps of a block read one row tile from end to end.
FRESHET_HOST_DEVICE inline int leaves(int64_t cols) {
  return cols >= 2048 ? 8 : cols >= 1024 ? 4 : cols >= 512 ? 2 : 1;
}
// FP8 on Hopper: whether K is not split. Weights with enough rows keep two thirds of 132 SMs busy
// until the end with tiles of 128 rows, and a block has room for sums of twice as many rows. This
// depends on the weight alone, because it determines the order of sums.
FRESHET_HOST_DEVICE inline bool whole_in_k(int64_t rows) {
  constexpr int64_t kTile = 128, kBlocks = 132;
  const int64_t tiles = (rows + kTile - 1) / kTile, turns = (tiles + kBlocks - 1) / kBlocks;
  return tiles * 3 >= turns * kBlocks * 2;
}
FRESHET_HOST_DEVICE inline int fp8_leaves(int64_t rows, int64_t cols) {
  if (whole_in_k(rows)) return 1;
  return cols >= 2048 ? 4 : cols >= 1024 ? 2 : 1;
}

// The number of blocks with `rows` rows each.
int64_t blocks_of(const GemmProblem& p, int64_t rows);
// The minimal number of 16-row tiles per block if every SM has at most one block.
int even_share(const DeviceLimits& limits, const GemmProblem& p);

// The layout of block formats on Hopper, as the kernels use it.
constexpr uint64_t bit(Code code) {
  return uint64_t{1} << static_cast<int>(code);
}
inline constexpr uint64_t kBlockFormats =
    bit(Code::kQ8_0) | bit(Code::kQ4_0) | bit(Code::kQ4_K) | bit(Code::kQ6_K) | bit(Code::kMXFP4) |
    bit(Code::kQ4_1) | bit(Code::kQ5_0) | bit(Code::kQ5_1) | bit(Code::kIQ4_NL) |
    bit(Code::kIQ4_XS) | bit(Code::kQ2_K) | bit(Code::kQ3_K) | bit(Code::kQ5_K) |
    bit(Code::kInt4G128) | bit(Code::kInt4G32);
// Columns of a 16-row tile; 0: not a block format.
constexpr int unit_of(Code code) {
  constexpr uint64_t kUnits256 = bit(Code::kQ4_K) | bit(Code::kQ6_K) | bit(Code::kQ5_K) |
                                 bit(Code::kQ3_K) | bit(Code::kIQ4_XS) | bit(Code::kQ2_K);
  if (code >= Code::kCount || (kBlockFormats & bit(code)) == 0) return 0;
  if (code == Code::kInt4G128) return 128;
  return (kUnits256 & bit(code)) != 0 ? 256 : 64;
}
// Bytes of such a tile; 0: not a block format.
constexpr int tile_bytes(Code code) {
  switch (code) {
    case Code::kMXFP4:
      return 544;
    case Code::kQ4_0:
    case Code::kIQ4_NL:
      return 576;
    case Code::kQ4_1:
    case Code::kInt4G32:
      return 640;
    case Code::kQ5_0:
      return 704;
    case Code::kQ5_1:
      return 768;
    case Code::kQ8_0:
    case Code::kInt4G128:
      return 1088;
    case Code::kQ2_K:
      return 1344;
    case Code::kQ3_K:
      return 2048;
    case Code::kIQ4_XS:
      return 2304;
    case Code::kQ4_K:
      return 2560;
    case Code::kQ5_K:
      return 3072;
    case Code::kQ6_K:
      return 3584;
    default:
      return 0;
  }
}
// Whether all split-K slices have the same size; kernels whose warps split K have simpler code for
// this case.
inline bool slices_are_even(Code code, int64_t cols) {
  return cols % (leaves(cols) * unit_of(code)) == 0;
}
// gemm_q_sm90_m1_8.cu: two blocks that share an SM have room for two tiles each.
inline constexpr uint64_t kTwoTiles = kBlockFormats & ~(bit(Code::kQ6_K) | bit(Code::kQ5_K));
// swiglu_q_sm90_m1_8.cu: the pipelines fit, and lanes need few registers.
inline constexpr uint64_t kManyWarps =
    kBlockFormats & ~(bit(Code::kQ8_0) | bit(Code::kQ6_K) | bit(Code::kQ2_K));
// gemm_q_sm90_m17_64.cuh: two warpgroups with 128 rows each are faster than four with 64.
inline constexpr uint64_t kDeepGroups =
    bit(Code::kQ4_0) | bit(Code::kQ4_K) | bit(Code::kQ8_0) | bit(Code::kQ4_1);

// gemm_q_sm90_m1_8_small_n.cu, whose blocks request all of their weights at once: shared memory of
// an SM, what a block needs besides weights (sums, barriers, reserved), and the unit in which it
// prefetches the next GEMM (bytes).
inline constexpr int kOneShotShared = 227 << 10, kOneShotBeside = 9 * 1024 + 512;
inline constexpr int kOneShotNext = 1024;
// gemm_q_sm90_two_formats.cu: clusters of two blocks, with one tile each, fit in one wave.
bool pair_fits_one_wave(const DeviceLimits& limits, const GemmProblem& p, int64_t rows_of_q6_k);
// Also used by prefetch_next_gemm.cu.
bool swiglu_large_n_takes(const DeviceLimits& limits, int64_t rows, int64_t cols);

// gemm_fp8_sm90_m1_64.cu: blocks claim panels dynamically if there are many whose K is not split.
inline constexpr int kFp8ClaimRoom = (225 << 10) - 2048, kFp8ClaimStages = kFp8ClaimRoom / 8448;
bool fp8_claims(const DeviceLimits& limits, const GemmProblem& p);
// gemm_fp8_sm90_m65_128_splitk2.cu: 8-row tiles per pair of blocks; 0: not supported.
int fp8_splitk_tiles(const DeviceLimits& limits, const GemmProblem& p);

}  // namespace freshet::cuda

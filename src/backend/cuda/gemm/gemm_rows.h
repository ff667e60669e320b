// Which kernel runs a GEMM: the tables for out = W x, and for gate and up with a SwiGLU epilogue.
//
// Everything here is a function of formats, sizes, tokens and the device's limits, so that the
// choice can be printed and tested without a GPU. A GEMM's problem is a list of weights of one
// format (or of two, for the rows named q_pair) that are multiplied by the same number of tokens in
// one launch. Kernels sum in the same order, so the choice affects speed and changes no bit (FP8 on
// Hopper cuts K by the weight's size alone).
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
  bool aligned = true;      // F32: rows of x are multiples of four floats, 16-byte aligned

  void add(const GemmWeight& weight) {
    if (count == 0) format = static_cast<int>(weight.code);
    of[count++] = weight;
  }
};

using GemmRow = KernelRow<GemmProblem>;

// The kernels for out = W x, best first.
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

// The kernels for gate and up, two weights of one format and size.
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

// The layout in which GEMMs with weights in this format read their activations.
Order activation_order(const DeviceLimits& limits, Code code, int64_t tokens);

// The number of split-K slices: eight, as long as a slice has 256 columns, so that a block of eight
// warps reads one tile of rows contiguously.
FRESHET_HOST_DEVICE inline int leaves(int64_t cols) {
  return cols >= 2048 ? 8 : cols >= 1024 ? 4 : cols >= 512 ? 2 : 1;
}
// FP8 on Hopper: whether K stays whole. Weights with enough rows keep two thirds of 132 SMs busy
// until the end with tiles of 128 rows, and a block can then hold the sums of twice as many rows.
// It depends on the weight alone, since it decides the order of sums.
FRESHET_HOST_DEVICE inline bool whole_in_k(int64_t rows) {
  constexpr int64_t kTile = 128, kBlocks = 132;
  const int64_t tiles = (rows + kTile - 1) / kTile, turns = (tiles + kBlocks - 1) / kBlocks;
  return tiles * 3 >= turns * kBlocks * 2;
}
FRESHET_HOST_DEVICE inline int fp8_leaves(int64_t rows, int64_t cols) {
  if (whole_in_k(rows)) return 1;
  return cols >= 2048 ? 4 : cols >= 1024 ? 2 : 1;
}

// Common parameters of several kernels.
inline constexpr int kRowWarps = 8, kClusterPair = 2;  // warps per block; blocks that share K
inline constexpr int kKSlices = 8;                     // upper bound of the split-K slices

inline int64_t div_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int64_t first_cols(const GemmProblem& p) {
  return p.of[0].cols;
}
inline bool eight_slices(const GemmProblem& p) {
  return leaves(first_cols(p)) == kKSlices;
}
// The number of blocks with `rows` rows each.
int64_t blocks_of(const GemmProblem& p, int64_t rows);
// The fewest 16-row tiles per block such that every SM has at most one block.
int even_share(const DeviceLimits& limits, const GemmProblem& p);
// Index of the first weight in Q6_K; 0: the list has one format.
inline int second_format(const GemmProblem& p) {
  int i = 1;
  while (i < p.count && p.of[i].code == p.of[0].code) ++i;
  return i < p.count && p.of[i].code == Code::kQ6_K ? i : 0;
}
// Blocks if clusters of two blocks split K and each cluster has `rows` rows.
inline int64_t split_blocks(const GemmProblem& p, int64_t rows) {
  return blocks_of(p, rows) * kClusterPair;
}
inline GemmProblem only_gate(const GemmProblem& p, int64_t rows_to) {
  GemmProblem gate = p;
  gate.count = 1;
  gate.of[0].rows = div_up(p.of[0].rows, rows_to) * rows_to;
  return gate;
}
inline bool whole_lines(const GemmProblem& p) {
  return p.of[0].rows % kPadCols == 0;
}

// Block formats on Hopper: the layout that their kernels use.
constexpr uint64_t bit(Code code) {
  return uint64_t{1} << static_cast<int>(code);
}
inline constexpr uint64_t kBlockFormats =
    bit(Code::kQ8_0) | bit(Code::kQ4_0) | bit(Code::kQ4_K) | bit(Code::kQ6_K) | bit(Code::kMXFP4) |
    bit(Code::kQ4_1) | bit(Code::kQ5_0) | bit(Code::kQ5_1) | bit(Code::kIQ4_NL) |
    bit(Code::kIQ4_XS) | bit(Code::kQ2_K) | bit(Code::kQ3_K) | bit(Code::kQ5_K) |
    bit(Code::kInt4G128) | bit(Code::kInt4G32);
// Columns of a tile of 16 rows; 0: not a block format.
constexpr int unit_of(Code code) {
  constexpr uint64_t kUnits256 = bit(Code::kQ4_K) | bit(Code::kQ6_K) | bit(Code::kQ5_K) |
                                 bit(Code::kQ3_K) | bit(Code::kIQ4_XS) | bit(Code::kQ2_K);
  if (code >= Code::kCount || (kBlockFormats & bit(code)) == 0) return 0;
  if (code == Code::kInt4G128) return 128;
  return (kUnits256 & bit(code)) != 0 ? 256 : 64;
}
// The bytes of such a tile; 0: not a block format.
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
// Whether all slices of K have the same size; a block whose warps share K has simpler code then.
inline bool slices_are_even(Code code, int64_t cols) {
  return cols % (leaves(cols) * unit_of(code)) == 0;
}
// gemm_q_sm90_m1_8.cu: formats of which two blocks with two tiles each fit on an SM.
inline constexpr uint64_t kTwoTiles = kBlockFormats & ~(bit(Code::kQ6_K) | bit(Code::kQ5_K));
// swiglu_q_sm90_m1_8.cu: formats whose pipelines fit and whose lanes need few registers.
inline constexpr uint64_t kManyWarps =
    kBlockFormats & ~(bit(Code::kQ8_0) | bit(Code::kQ6_K) | bit(Code::kQ2_K));
// gemm_q_sm90_m17_64.cuh: two warpgroups with 128 rows each are faster than four with 64.
inline constexpr uint64_t kDeepGroups =
    bit(Code::kQ4_0) | bit(Code::kQ4_K) | bit(Code::kQ8_0) | bit(Code::kQ4_1);

}  // namespace freshet::cuda

// The layout of packed weights and of encoded activations. Each format has one layout for all
// instruction sets.
//
// A panel is 16 output rows. Its "lines" are 64 bytes: 16 rows x 4 bytes, so that a dword lane (or
// a column of an AMX tile) is an output row. In integer formats the four bytes are four consecutive
// k, a "quad". Narrow formats keep several quads in one line, in the bits of each byte, as their
// blocks do: packing moves dwords and changes no bit (except the high bits of Q5_0 and Q5_1, which
// are transposed within a row's 32). A panel consists of the main parts of all its blocks (a
// multiple of 64 bytes each), then the tails of all its blocks:
//
//   format   main part of a block                                        tail
//   q4_0     4 lines                                                     d[16] f16
//   q4_1     4 lines, d[16] m[16] f16
//   q5_0     4 lines, 1 line of high bits                                d[16] f16
//   q5_1     4 lines, 1 line of high bits, d[16] m[16] f16
//   q8_0     8 lines                                                     d[16] f16
//   iq4_nl   4 lines                                                     d[16] f16
//   mxfp4    4 lines                                                     e[16] bytes
//   int4     a group is 128 or 32 k: 16 or 4 lines                       d[16] u16, dz[16] bytes
//   q2_k     16 lines, 4 of scales, d[16] dmin[16] f16
//   q3_k     16 lines, 8 of high bits, 3 of scales                       d[16] f16
//   q4_k     32 lines, 3 of scales, d[16] dmin[16] f16
//   q5_k     32 lines, 8 of high bits, 3 of scales, d[16] dmin[16] f16
//   q6_k     32 lines, 16 of high bits, 4 of scales                      d[16] f16
//   iq4_xs   32 lines, 1 of scales, d[16] f16, scales_h[16] u16
//   iq1_s    12 lines                                                    d[16] f16
//   iq1_m    14 lines
//   iq2_xxs  16 lines                                                    d[16] f16
//   iq2_xs   18 lines                                                    d[16] f16
//   iq2_s    20 lines                                                    d[16] f16
//   iq3_xxs  24 lines                                                    d[16] f16
//   iq3_s    27 lines                                                    d[16] f16
//   tq1_0    13 lines                                                    d[16] f16
//   tq2_0    16 lines                                                    d[16] f16
//   f32      a block is 32 k: 32 lines, each 16 rows x 1 k
//   f16      16 lines, each two k: 16 rows of the even one, then 16 rows of the odd one
//   bf16     16 lines, each 16 rows x 2 k (a row of an AMX BF16 tile): for every four k,
//            first 0 and 2, then 1 and 3
//   fp8      a block is 128 k: 32 lines, each 16 rows x 2 k, then 16 rows of the next two;
//            scale[16] f32
//   int8     a block is 64 k: 16 lines (an AMX tile); after all blocks, a line: scale[16] f32
//   mxfp8    a block is 32 k: 8 lines as in fp8                          e[16] bytes
//   fp8_g32  the same, then scale[16] f32
//   nf4, fp4 a block is 64 k: 8 lines of 8 k each, then scale[16] f32
//   nvfp4    a block is 16 k: 2 lines; after all blocks: scale[16] f32   scale[16] bytes
//   int2, int3, int8_g   for every 32 k 2, 3 or 8 lines; then zd[16] u32
//
// Rows past the last one are zero bytes, and so are values past the end of a row.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/format.h"

namespace freshet::cpu {

inline constexpr int kPanelRows = 16;
inline constexpr int kLine = 64;

struct PanelLayout {
  int block = 0;  // values per block
  int main = 0;   // bytes of a block of a panel (16 rows)
  int tail = 0;
  int foot = 0;  // bytes after all blocks: the heads of rows
};

constexpr PanelLayout panel_layout(quant::Format f) {
  using quant::Format;
  switch (f) {
    case Format::kF32:
      return {32, 32 * kLine, 0};
    case Format::kF16:
    case Format::kBF16:
      return {32, 16 * kLine, 0};
    case Format::kFP8:
      return {128, 33 * kLine, 0};
    case Format::kINT8:
      return {64, 16 * kLine, 0, kLine};
    case Format::kQ4_0:
    case Format::kIQ4_NL:
      return {32, 4 * kLine, 32};
    case Format::kQ4_1:
      return {32, 5 * kLine, 0};
    case Format::kQ5_0:
      return {32, 5 * kLine, 32};
    case Format::kQ5_1:
      return {32, 6 * kLine, 0};
    case Format::kQ8_0:
      return {32, 8 * kLine, 32};
    case Format::kMXFP4:
      return {32, 4 * kLine, 16};
    case Format::kInt4G128:
      return {128, 16 * kLine, 48};
    case Format::kInt4G32:
      return {32, 4 * kLine, 48};
    case Format::kQ2_K:
      return {256, 21 * kLine, 0};
    case Format::kQ3_K:
      return {256, 27 * kLine, 32};
    case Format::kQ4_K:
      return {256, 36 * kLine, 0};
    case Format::kQ5_K:
      return {256, 44 * kLine, 0};
    case Format::kQ6_K:
      return {256, 52 * kLine, 32};
    case Format::kIQ4_XS:
      return {256, 34 * kLine, 0};
    case Format::kMXFP8:
      return {32, 8 * kLine, 16};
    case Format::kFP8G32:
      return {32, 9 * kLine, 0};
    case Format::kNF4:
    case Format::kFP4:
      return {64, 9 * kLine, 0};
    case Format::kNVFP4:
      return {16, 2 * kLine, 16, kLine};
    case Format::kInt2G128:
      return {128, 9 * kLine, 0};
    case Format::kInt2G32:
      return {32, 3 * kLine, 0};
    case Format::kInt3G128:
      return {128, 13 * kLine, 0};
    case Format::kInt3G32:
      return {32, 4 * kLine, 0};
    case Format::kInt8G128:
      return {128, 33 * kLine, 0};
    case Format::kInt8G32:
      return {32, 9 * kLine, 0};
    case Format::kIQ1_S:
      return {256, 12 * kLine, 32};
    case Format::kIQ1_M:
      return {256, 14 * kLine, 0};
    case Format::kIQ2_XXS:
    case Format::kTQ2_0:
      return {256, 16 * kLine, 32};
    case Format::kIQ2_XS:
      return {256, 18 * kLine, 32};
    case Format::kIQ2_S:
      return {256, 20 * kLine, 32};
    case Format::kIQ3_XXS:
      return {256, 24 * kLine, 32};
    case Format::kIQ3_S:
      return {256, 27 * kLine, 32};
    case Format::kTQ1_0:
      return {256, 13 * kLine, 32};
  }
  return {};
}

constexpr int64_t blocks_of(int64_t cols, int block) {
  return (cols + block - 1) / block;
}

constexpr int64_t panel_bytes(const PanelLayout& l, int64_t cols) {
  return (blocks_of(cols, l.block) * (l.main + l.tail) + l.foot + kLine - 1) / kLine * kLine;
}

// Encoded activations have two planes: a coarse one, and a fine one with the remainder. A GEMM with
// a large matrix, where many small errors cancel, uses the coarse plane only. A GEMM with a smaller
// matrix adds the fine plane and is exact to about 16 bits. The choice depends only on the weight's
// shape.
constexpr bool uses_fine_plane(int64_t rows, int64_t cols) {
  return rows < 2048 || cols < 2048;
}

// Row sizes are an odd number of lines, so that the rows of a tile do not share a cache set.
constexpr int64_t act_row_size(int64_t bytes) {
  return ((bytes + kLine - 1) / kLine | 1) * kLine;
}

// x = d * (coarse + fine / 254), both within +-127.
inline constexpr float kFineSteps = 254.0f;

// A row in ActKind::kQ8x256: int8 coarse[256 * n], int8 fine[256 * n], then two records per block,
// then one line per four blocks: the sum of every 32 coarse values, times d, as BF16 (ties away
// from zero). The sums of blocks past the last one are zero.
struct Q8x256Record {
  float d;  // in the fine record: the fine step
  float minus_d;
  int32_t unused[2];
  // Sums of 32 values as pairs (0, 2), (1, 3), (4, 6), (5, 7): the order in which the minima of
  // Q4_K are unpacked from their bytes. Sums of 16 values likewise: (0, 2), (1, 3), (4, 6) ...
  int16_t sum32[8];
  int16_t sum16[16];
};
static_assert(sizeof(Q8x256Record) == kLine);

struct Q8x256Layout {
  int64_t fine;
  int64_t records;
  int64_t sums;
  int64_t bytes;
};
constexpr Q8x256Layout q8x256_layout(int64_t cols) {
  const int64_t n = blocks_of(cols, 256), sums = n * (512 + 2 * kLine);
  return {n * 256, n * 512, sums, act_row_size(sums + (n + 3) / 4 * kLine)};
}

// A row in ActKind::kInt8: codes, padded with zeros to whole blocks of 64, then a record.
struct Int8Record {
  float d;
  int32_t sum;  // of the codes
};
struct Int8Layout {
  int64_t record;
  int64_t bytes;
};
constexpr Int8Layout int8_layout(int64_t cols) {
  const int64_t n = blocks_of(cols, kLine) * kLine;
  return {n, act_row_size(n + kLine)};
}

// Rows of kF32 are unchanged. A row in ActKind::kBF16 is padded with zeros to a multiple of 32
// values: coarse, then fine (both BF16), with the middle two of every four values swapped as in a
// panel of BF16.
constexpr int64_t padded_cols(int64_t cols) {
  return (cols + 31) / 32 * 32;
}
struct Bf16Layout {
  int64_t fine;
  int64_t bytes;
};
constexpr Bf16Layout bf16_layout(int64_t cols) {
  const int64_t n = padded_cols(cols);
  return {n * 2, act_row_size(n * 4)};
}

}  // namespace freshet::cpu

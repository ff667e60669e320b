// How weight formats are packed in tiles of 16 rows by kUnit columns, and how a lane decodes its
// fragment.
//
// A lane of mma.m16n8k16 multiplies rows g = lane / 4 and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9 of every 16 (t = lane % 4), so a tile keeps each lane's quants together:
//   quants  [kUnit / 64 pieces][vectors per piece][32 lanes][16 bytes]
//   scales  [8 (g)][bytes of rows g and g + 8]
// (BF16 is packed as core matrices instead.) A piece is 64 columns.
// `Format::load` fetches a lane's part of a piece; `decode` dequantises it into four A operands.
// Elements with scales become BF16 values: the scale is rounded to BF16, and so is its product with
// the element, each with a relative error of up to 2^-8 (in formats with minima: relative to the
// element's distance from the middle of its range). FP8 codes are decoded without their scales;
// sums over a group of kGroup operands are multiplied by the scale. Packing moves bits without
// changing them, except the scales of formats with kHasHeads: these are converted to the form that
// kernels use.
#pragma once

#include "backend/cuda/formats/blocks32.cuh"
#include "backend/cuda/formats/gguf_bits.cuh"
#include "backend/cuda/formats/int.cuh"
#include "backend/cuda/formats/k_quants.cuh"
#include "backend/cuda/formats/values.cuh"

namespace freshet::cuda {

// Calls body with the format's struct; returns false for an unknown code.
template <class Body>
bool with_format(Code code, const Body& body) {
  switch (code) {
    case Code::kF32:
      body(F32{});
      return true;
    case Code::kF16:
      body(F16{});
      return true;
    case Code::kBF16:
      body(BF16{});
      return true;
    case Code::kFP8:
      body(FP8{});
      return true;
    case Code::kQ8_0:
      body(Q8_0{});
      return true;
    case Code::kQ4_0:
      body(Q4_0{});
      return true;
    case Code::kQ4_K:
      body(Q4_K{});
      return true;
    case Code::kQ6_K:
      body(Q6_K{});
      return true;
    case Code::kMXFP4:
      body(MXFP4{});
      return true;
    case Code::kQ4_1:
      body(Q4_1{});
      return true;
    case Code::kQ5_0:
      body(Q5_0{});
      return true;
    case Code::kQ5_1:
      body(Q5_1{});
      return true;
    case Code::kIQ4_NL:
      body(IQ4_NL{});
      return true;
    case Code::kIQ4_XS:
      body(IQ4_XS{});
      return true;
    case Code::kQ2_K:
      body(Q2_K{});
      return true;
    case Code::kQ3_K:
      body(Q3_K{});
      return true;
    case Code::kQ5_K:
      body(Q5_K{});
      return true;
    case Code::kInt8:
      body(INT8{});
      return true;
    case Code::kInt4G128:
      body(Int4G128{});
      return true;
    case Code::kInt4G32:
      body(Int4G32{});
      return true;
    case Code::kCount:
    case Code::kExactF32:   // gemm_f32_bf16x3.cuh
    case Code::kFP8Panels:  // packed as panels by pack.cu, which names the struct itself
    case Code::kHeads:      // stored scales beside the tiles (blocks32.cuh); never multiplied
      break;
  }
  return false;
}

// Block formats with few bits per element, which lanes dequantise into registers.
template <class F>
inline constexpr bool kQuantised = F::kBlock > 1 && F::kCode != Code::kFP8;
inline bool quantised(Code code) {
  bool is = false;
  with_format(code, [&](auto f) { is = kQuantised<decltype(f)>; });
  return is;
}
// For device code: whether the mma kernels run this format for any number of tokens. On Hopper,
// wgmma kernels take over for many tokens, and those instances need not be compiled.
#if __CUDA_ARCH__ >= 900
template <class F>
inline constexpr bool kHasOnlyMma = !kQuantised<F>;
#else
template <class F>
inline constexpr bool kHasOnlyMma = true;
#endif

// The number of row tiles that are interleaved, one column unit after the other, so that a K step
// of BF16 weights in gemm_bf16_sm90_m65.cu is one bulk copy.
template <class F>
inline constexpr int kPanelTiles = 1;
template <>
inline constexpr int kPanelTiles<BF16> = 8;
template <>
inline constexpr int kPanelTiles<FP8> = 4;
template <>
inline constexpr int kPanelTiles<FP8Values> = 4;
template <>
inline constexpr int kPanelTiles<FP8Panels> = 4;
template <>
inline constexpr int kPanelTiles<INT8> = 8;

// Bytes from a tile to the next one along K.
template <class F>
inline constexpr int64_t kUnitStep = int64_t{kPanelTiles<F>} * F::kTileBytes;

// Offset of a row tile, and the bytes of `tiles` row tiles.
template <class F>
__host__ __device__ __forceinline__ int64_t tile_at(int64_t tile, int64_t cols) {
  const int64_t units = (cols + F::kUnit - 1) / F::kUnit;
  return tile / kPanelTiles<F> * units * kUnitStep<F> + tile % kPanelTiles<F> * F::kTileBytes;
}
template <class F>
__host__ __device__ __forceinline__ int64_t tiles_bytes(int64_t tiles, int64_t cols) {
  return tile_at<F>((tiles + kPanelTiles<F> - 1) / kPanelTiles<F> * kPanelTiles<F>, cols);
}

// The scales of INT8 rows, which follow all tiles.
__host__ __device__ __forceinline__ const float* int8_scales(const uint8_t* packed, int64_t rows,
                                                             int64_t cols) {
  return reinterpret_cast<const float*>(packed + tiles_bytes<INT8>((rows + 15) / 16, cols));
}

}  // namespace freshet::cuda

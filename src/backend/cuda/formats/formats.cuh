// How stored formats lie in tiles of 16 rows by kUnit columns, and how a lane decodes its share.
//
// A lane of mma.m16n8k16 multiplies rows g = lane / 4 and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and
// 2 t + 9 of every 16 (t = lane % 4), so a tile keeps each lane's numbers together:
//   quants  [kUnit / 64 pieces][vectors a piece][32 lanes][16 bytes]
//   scales  [8 (g)][bytes of rows g and g + 8]
// (BF16 has core matrices instead.)
// `Format::load` fetches a lane's part of 64 columns, `decode` turns it into four A operands.
// Numbers with scales become values in BF16: the scale is rounded to it and so is its product with
// the number, each by up to 2^-8 of itself (with least values: of the number's distance from the
// middle of its range). FP8's are left without their scales, and sums over a group of kGroup
// operands are multiplied by it.
// Packing moves bits and changes none, but for scales where kHasHeads: these are made what they are
// used as.
#pragma once

#include "backend/cuda/formats/blocks32.cuh"
#include "backend/cuda/formats/gguf_bits.cuh"
#include "backend/cuda/formats/int.cuh"
#include "backend/cuda/formats/k_quants.cuh"
#include "backend/cuda/formats/values.cuh"

namespace freshet::cuda {

// Calls body with the format's struct; false where there is none.
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
    case Code::kFP8Panels:  // FP8Panels
    case Code::kHeads:      // Heads
      break;
  }
  return false;
}

// Numbers of few bits in blocks, which lanes decode into registers.
template <class F>
inline constexpr bool kQuantised = F::kBlock > 1 && F::kCode != Code::kFP8;
inline bool quantised(Code code) {
  bool is = false;
  with_format(code, [&](auto f) { is = kQuantised<decltype(f)>; });
  return is;
}
// For device code: whether kernels of mma are called for any number of tokens. Hopper has wgmma,
// and need not hold the others.
#if __CUDA_ARCH__ >= 900
template <class F>
inline constexpr bool kHasOnlyMma = !kQuantised<F>;
#else
template <class F>
inline constexpr bool kHasOnlyMma = true;
#endif

// So many tiles of rows lie side by side, a unit of columns after the other: what a block of
// gemm_bf16_sm90_m65.cu takes of BF16 at once is one copy.
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

// From a tile to the one to the right of it.
template <class F>
inline constexpr int64_t kUnitStep = int64_t{kPanelTiles<F>} * F::kTileBytes;

// Where a tile of rows begins, and how many bytes `tiles` of them take.
template <class F>
__host__ __device__ __forceinline__ int64_t tile_at(int64_t tile, int64_t cols) {
  const int64_t units = (cols + F::kUnit - 1) / F::kUnit;
  return tile / kPanelTiles<F> * units * kUnitStep<F> + tile % kPanelTiles<F> * F::kTileBytes;
}
template <class F>
__host__ __device__ __forceinline__ int64_t tiles_bytes(int64_t tiles, int64_t cols) {
  return tile_at<F>((tiles + kPanelTiles<F> - 1) / kPanelTiles<F> * kPanelTiles<F>, cols);
}

// The scales of INT8's rows, behind all tiles.
__host__ __device__ __forceinline__ const float* int8_scales(const uint8_t* packed, int64_t rows,
                                                             int64_t cols) {
  return reinterpret_cast<const float*>(packed + tiles_bytes<INT8>((rows + 15) / 16, cols));
}

}  // namespace freshet::cuda

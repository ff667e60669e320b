// SwiGLU epilogues.
//
// With few tokens a warp has gate's and up's sums of the same rows, and writes activations in
// fragment order. With many tokens one warpgroup has gate's sums of 64 rows, another one up's for
// the same rows and tokens, both in mma's accumulator layout. They exchange halves, so that each
// thread has both values, and the result is written once, as core matrices.
#pragma once

#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/glu_activation.cuh"
#include "backend/cuda/runtime/register_transpose.cuh"

namespace freshet::cuda {

// The activation is a template argument, since a run-time choice per element would cost as much as
// the GLU itself.
inline constexpr int kSilu = 1;
struct SiluUnit {
  __device__ __forceinline__ float operator()(float gate, float up) const {
    return __fmul_rn(activate(gate, kSilu), up);
  }
};
struct LimitedUnit {
  GluArgs glu;
  __device__ __forceinline__ float operator()(float gate, float up) const {
    return limited(gate, up, glu);
  }
};
inline constexpr int kTokenTileBytes = kTokenTile * 64 * 2;

// Shared memory, in bytes, for Round token tiles at once.
template <int Round>
inline constexpr int kExchangeBytes = 2 * Round * 128 * 16;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void sync_pair() {  // two warpgroups
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

// The operations of finish() on the sums of NT tiles.
template <int NT, class F = BF16>
__device__ __forceinline__ void end_sums(const ProductArgs& p, float (&sum)[NT][4], int64_t row) {
  if constexpr (F::kUp != 1.0f) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][i] = __fmul_rn(sum[j][i], F::kUp);
    }
  }
  if (p.bias != nullptr) {
    float bias[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + r * 8 < p.weight.rows) bias[r] = p.bias[row + r * 8];
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][i] = __fadd_rn(sum[j][i], bias[i / 2]);
    }
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[j][i] = __fmul_rn(sum[j][i], p.scale);
  }
}

// A warp's 16 rows by 8 tokens, transposed: a lane gets adjacent rows of a token, in the first 8
// rows and in the last 8.
template <class Unit = SiluUnit>
__device__ __forceinline__ uint2 gated_pairs(const float (&gate)[4], const float (&up)[4],
                                             const Unit& unit = {}) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = unit(gate[i], up[i]);
  return make_uint2(transposed(pack_bf16(v[0], v[1])), transposed(pack_bf16(v[2], v[3])));
}
// The same rows and tokens in fragment order; `cols`: columns of the activations.
__device__ __forceinline__ void put_gated_lanes(const Activations& act, int64_t cols,
                                                const float (&gate)[4], const float (&up)[4],
                                                int64_t row_tile, int64_t token_tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t at =
      activation_at(act, token_tile * 8 + lane / 4, row_tile * 16 + lane % 4 * 2, cols);
  *reinterpret_cast<uint2*>(act.data + at * 2) = gated_pairs(gate, up);
}
template <class Unit = SiluUnit>
__device__ __forceinline__ void put_gated(uint8_t* to, const float (&gate)[4], const float (&up)[4],
                                          bool real, const Unit& unit = {}) {
  const uint2 v = gated_pairs(gate, up, unit);
  if (!real) return;
  *reinterpret_cast<uint32_t*>(to) = v.x;
  *reinterpret_cast<uint32_t*>(to + 128) = v.y;
}

// Threads 0 to 127 have gate's sums, 128 to 255 up's, of 64 rows from row_tile on; rows from
// end_tile on are out of bounds. Both warpgroups share `room`, which may be overwritten afterwards.
template <int NT, int Round, class F = BF16, class Unit = SiluUnit>
__device__ __forceinline__ void finish_gated(const Activations& act, const ProductArgs& product,
                                             float (&sum)[NT][4], float4* room, int64_t row_tile,
                                             int64_t end_tile, int64_t token_tile,
                                             const Unit& unit = {}) {
  static_assert(NT / 2 % Round == 0);
  const int thread = static_cast<int>(threadIdx.x % 128), warp = thread / 32;
  row_tile += warp;
  const int64_t tile = row_tile / 4 * act.core_tiles + token_tile;
  uint8_t* to = act.data + (tile * 4 + row_tile % 4) * 256 + thread % 32 * 4;
  const int left = row_tile < end_tile ? static_cast<int>(act.core_tiles - token_tile) : 0;
  end_sums<NT, F>(product, sum, row_tile * 16 + thread % 32 / 4);
  const auto exchange = [&](auto group) {
    constexpr int kGroup = decltype(group)::value;
    constexpr int kMine = kGroup * (NT / 2), kTheirs = NT / 2 - kMine;
    float4* give = room + kGroup * Round * 128 + thread;
    const float4* take = room + (1 - kGroup) * Round * 128 + thread;
#pragma unroll
    for (int first = 0; first < NT / 2; first += Round) {
      if (first > 0) sync_pair();
#pragma unroll
      for (int j = 0; j < Round; ++j) {
        const float(&v)[4] = sum[kTheirs + first + j];
        give[j * 128] = make_float4(v[0], v[1], v[2], v[3]);
      }
      sync_pair();
#pragma unroll
      for (int j = 0; j < Round; ++j) {
        const float4 v = take[j * 128];
        const float other[4] = {v.x, v.y, v.z, v.w};
        const float(&mine)[4] = sum[kMine + first + j];
        const int at = kMine + first + j;
        put_gated(to + at * kTokenTileBytes, kGroup == 0 ? mine : other, kGroup == 0 ? other : mine,
                  at < left, unit);
      }
    }
    sync_pair();
  };
  if (__shfl_sync(0xffffffff, threadIdx.x, 0) < 128) {  // uniform within a warp
    exchange(std::integral_constant<int, 0>{});
  } else {
    exchange(std::integral_constant<int, 1>{});
  }
}
#endif

}  // namespace freshet::cuda

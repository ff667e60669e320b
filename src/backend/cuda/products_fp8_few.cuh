// What products of few tokens in FP8 share (Hopper): rings of panels, and a step's sums.
#pragma once

#include "backend/cuda/ahead.cuh"
#include "backend/cuda/products_fp8.cuh"

namespace freshet::cuda {

inline constexpr int kFp8SharedBytes = 225 << 10;
// In flight to a multiprocessor before the kernel in front has ended: enough for memory's rate, and
// a norm's loads wait for no more.
inline constexpr int kFp8AheadBytes = 24 << 10;

// Steps of a leaf, at most.
__host__ __device__ inline int most_steps(int64_t cols, int leaves) {
  return static_cast<int>((ceil_div(cols, kE4M3Cols) + leaves - 1) / leaves);
}

// A place for what comes near: half a step.
inline constexpr int kNearBytes = kPanelBytes / 2;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kStepCols = kE4M3Cols;

constexpr int kScales = kTokenTile * kStepCols;  // where those of a tile of 8 rows lie

template <int kStageBytes>
struct Ring {
  uint8_t* stages;
  uint64_t *full, *empty;
  int count;  // of stages
  int stage = 0, round = 0;
  __device__ __forceinline__ uint8_t* data() const { return stages + stage * kStageBytes; }
  __device__ __forceinline__ void next() {
    if (++stage == count) {
      stage = 0;
      round ^= 1;
    }
  }
};

__device__ __forceinline__ const uint8_t* panel_at(const WeightView& w, int64_t panel, int step) {
  const int64_t steps = (w.cols + kStepCols - 1) / kStepCols;
  return w.data + (panel * steps + step) * kPanelBytes;
}
__device__ __forceinline__ const uint8_t* tokens_at(const ProductArgs& p, int64_t act_tiles,
                                                    int step, int64_t token_tile) {
  return p.act + (step * act_tiles + token_tile) * kE4M3TileBytes;
}

// The pages of tokens and of what is written, from `row` on.
__device__ __forceinline__ void look_up_pages(const ProductArgs& p, int64_t tokens, int64_t row,
                                              int lane) {
  const int64_t act_bytes = (tokens + 7) / 8 * most_steps(p.weight.cols, 1) * kE4M3TileBytes;
  if (lane < 2) look_up_page(p.out + (lane == 0 ? 0 : tokens - 1) * p.out_stride + row);
  if (lane == 2) look_up_page(p.act);
  if (lane == 3) look_up_page(p.act + act_bytes - 1);
}

// Scales of a lane's rows g and g + 8 of its warp's 16 in a panel (of weights or tokens).
__device__ __forceinline__ float2 row_scales(const uint8_t* panel) {
  const int g = static_cast<int>(threadIdx.x % 32 / 4),
            warp = static_cast<int>(threadIdx.x / 32 % 4);
  const uint8_t* p = panel + warp * FP8::kTileBytes + kScales + g * 4;
  return make_float2(*reinterpret_cast<const float*>(p),
                     *reinterpret_cast<const float*>(p + kE4M3TileBytes));
}
// Scales of a lane's rows 2 t and 2 t + 1 of a tile of 8.
__device__ __forceinline__ float2 pair_scales(const uint8_t* tile) {
  return *reinterpret_cast<const float2*>(tile + kScales + threadIdx.x % 4 * 8);
}

// What is looked up a tile ahead stays where it is written.
__device__ __forceinline__ int scaled(const WeightView& w, int64_t panel) {
  const int64_t last = (w.rows - 1) / kPanelRows;
  int how;
  asm volatile("ld.global.nc.s32 %0, [%1];"
               : "=r"(how)
               : "l"(FP8::scaled_at(w.data, w.rows, w.cols) + (panel < last ? panel : last)));
  return how;
}

// What follows a full ring comes near, to L2, until the kernel in front has ended: memory has time.
// A step at a time, since other kernels' loads are on their way. These are copies to a place that
// nobody reads: what prefetches bring is read hardly faster than from memory.
struct Near {
  uint8_t* place;
  uint64_t* barrier;
  int steps = 0;  // that have come
  __device__ __forceinline__ void bring(const uint8_t* from, int most, const volatile int& ended) {
    for (; steps < most && ended == 0; from += kPanelBytes, ++steps) {
      barrier_expect(barrier, kPanelBytes);
      bulk_copy(place, from, kNearBytes, barrier);
      bulk_copy(place, from + kNearBytes, kNearBytes, barrier);
      landed(barrier, ended, steps % 2);
    }
  }
  // Nothing is on its way any more.
  __device__ __forceinline__ void end() const {
    if (steps > 0) barrier_wait(barrier, (steps - 1) % 2);
  }
};

template <int NT>
__device__ __forceinline__ void clear(float (&sum)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
}

// leaf += a sum of 128 columns of a panel and NT tiles of tokens, scaled.
template <int NT>
__device__ __forceinline__ void add_step(float (&leaf)[NT][4], const float (&sum)[NT][4],
                                         const float2& w, const uint8_t* tokens) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const float2 t = pair_scales(tokens + j * kE4M3TileBytes);
    leaf[j][0] = __fmaf_rn(sum[j][0], __fmul_rn(w.x, t.x), leaf[j][0]);
    leaf[j][1] = __fmaf_rn(sum[j][1], __fmul_rn(w.x, t.y), leaf[j][1]);
    leaf[j][2] = __fmaf_rn(sum[j][2], __fmul_rn(w.y, t.x), leaf[j][2]);
    leaf[j][3] = __fmaf_rn(sum[j][3], __fmul_rn(w.y, t.y), leaf[j][3]);
  }
}
__device__ __forceinline__ float2 step_scales(const uint8_t* panel, bool of_rows) {
  return of_rows ? make_float2(1.0f, 1.0f) : row_scales(panel);
}
#endif

}  // namespace freshet::cuda

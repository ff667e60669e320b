// Shared by the FP8 kernels for few tokens (Hopper): pipelines of weight panels, and the sums of a
// K step.
#pragma once

#include "backend/cuda/gemm/gemm_fp8_sm90.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {

inline constexpr int kFp8SharedBytes = 225 << 10;
// Bytes in flight per SM before the previous kernel has ended: enough to saturate memory, and few
// enough that the loads of a norm don't queue behind them.
inline constexpr int kFp8AheadBytes = 24 << 10;

// Upper bound of the K steps of a split-K slice.
__host__ __device__ inline int most_steps(int64_t cols, int leaves) {
  return static_cast<int>((ceil_div(cols, kE4M3Cols) + leaves - 1) / leaves);
}

// Scratch buffer for prefetches (Near): half of the codes of a step.
inline constexpr int kNearBytes = kPanelCodes / 2;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kStepCols = kE4M3Cols;

template <int kStageBytes>
struct PanelRing {
  uint8_t* stages;
  Pipeline pipe;
  int count;  // stages
  PipelineState at;
  __device__ __forceinline__ uint8_t* data() const { return stages + at.stage * kStageBytes; }
  __device__ __forceinline__ uint64_t* filled() const { return pipe.filled(at.stage); }
  __device__ __forceinline__ void next() { at.next(count); }
};

__device__ __forceinline__ const uint8_t* panel_at(const WeightView& w, int64_t panel, int step) {
  const int64_t steps = (w.cols + kStepCols - 1) / kStepCols;
  return w.data + (panel * steps + step) * kPanelBytes;
}
__device__ __forceinline__ const uint8_t* tokens_at(const ProductArgs& p, int64_t act_tiles,
                                                    int step, int64_t token_tile) {
  return p.act + (step * act_tiles + token_tile) * kE4M3TileBytes;
}

// Looks up the pages (TLB) of the activations, and of the output from `row` on.
__device__ __forceinline__ void look_up_pages(const ProductArgs& p, int64_t tokens, int64_t row,
                                              int lane) {
  const int64_t act_bytes = (tokens + 7) / 8 * most_steps(p.weight.cols, 1) * kE4M3TileBytes;
  if (lane < 2) look_up_page(p.out + (lane == 0 ? 0 : tokens - 1) * p.out_stride + row);
  if (lane == 2) look_up_page(p.act);
  if (lane == 3) look_up_page(p.act + act_bytes - 1);
}

// sum = one K step of a panel times NT tiles of tokens; complete after wgmma_wait().
template <int NT>
__device__ __forceinline__ void fp8_ask(float (&sum)[NT][4], uint32_t panel, uint32_t tokens) {
  fp8_multiply<kTileCodes, kE4M3TileBytes>(sum, panel, tokens);
}

// Scales of a lane's two tokens, 2 t and 2 t + 1 of a tile of 8.
__device__ __forceinline__ float2 pair_scales(const uint8_t* tile) {
  return *reinterpret_cast<const float2*>(tile + kTileCodes + threadIdx.x % 4 * 8);
}

// Which rows of a panel share scales. `asm volatile` keeps the load where it is written: it is
// issued one tile ahead of its use.
__device__ __forceinline__ int scaled(const WeightView& w, int64_t panel) {
  const int64_t last = (w.rows - 1) / kPanelRows;
  int how;
  asm volatile("ld.global.nc.s32 %0, [%1];"
               : "=r"(how)
               : "l"(FP8Panels::scaled_at(w.data, w.rows, w.cols) + (panel < last ? panel : last)));
  return how;
}

// Prefetches the weights behind a full pipeline to L2 until the previous kernel has ended, since
// memory is idle until then. One step at a time, so that other kernels' loads don't queue. These
// are bulk copies to a scratch buffer that nobody reads: lines fetched by prefetch instructions
// were read hardly faster than from memory.
struct Near {
  uint8_t* place;
  uint64_t* barrier;
  int steps = 0;  // issued so far
  __device__ __forceinline__ void bring(const uint8_t* from, int most, const volatile int& ended) {
    for (; steps < most && ended == 0; from += kPanelBytes, ++steps) {
      barrier_expect(barrier, kPanelCodes);
      bulk_copy(place, from, kNearBytes, barrier);
      bulk_copy(place, from + kNearBytes, kNearBytes, barrier);
      landed(barrier, ended, steps % 2);
    }
  }
  // Waits until no copy is in flight.
  __device__ __forceinline__ void end() const {
    if (steps > 0) barrier_wait(barrier, (steps - 1) % 2);
  }
};

template <int NT>
__device__ __forceinline__ void clear(float (&sum)[NT][4]) {
#pragma unroll
  for (int j = 0; j < NT; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 0.0f;
}

// slice += the sum of a K step (128 columns of a panel, NT tiles of tokens) times its scales.
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

// A K step of a panel is copied as its codes and only the scales that are read: none if each row
// has one scale for all columns, one if all rows share it. Codes are requested first, since the
// scales need the lookup of scaled().
__device__ __forceinline__ void copy_codes(uint8_t* to, const uint8_t* from, uint64_t* barrier) {
  copy_weights(to, from, kPanelCodes, barrier);
}
__device__ __forceinline__ uint32_t scale_bytes(int scaled) {
  constexpr uint32_t kLeast = 16;  // smallest bulk copy
  return scaled == FP8Panels::kOfRows    ? 0
         : scaled == FP8Panels::kOfSteps ? kLeast
                                         : kPanelBytes - kPanelCodes;
}
// Sets the barrier's expected bytes for codes and scales.
__device__ __forceinline__ void copy_scales(uint8_t* to, const uint8_t* from, uint32_t bytes,
                                            uint64_t* barrier) {
  barrier_expect(barrier, kPanelCodes + bytes);
  if (bytes > 0) copy_weights(to + kPanelCodes, from + kPanelCodes, bytes, barrier);
}
// Scales of a lane's rows g and g + 8 of its warp's 16.
__device__ __forceinline__ float2 step_scales(const uint8_t* panel, int scaled) {
  if (scaled == FP8Panels::kOfRows) return make_float2(1.0f, 1.0f);
  const auto thread = static_cast<int>(threadIdx.x % 128);
  const bool shared = scaled == FP8Panels::kOfSteps;
  const int row = shared ? 0 : thread / 32 * 16 + thread % 32 / 4, apart = shared ? 0 : 8;
  const auto* scales = reinterpret_cast<const float*>(panel + kPanelCodes);
  return make_float2(scales[row], scales[row + apart]);
}
// The scale of a row whose panel has one scale per row.
__device__ __forceinline__ const float* row_scale(const WeightView& w, int64_t row) {
  const uint8_t* step = panel_at(w, row / kPanelRows, 0);
  return reinterpret_cast<const float*>(step + kPanelCodes) + row % kPanelRows;
}
#endif

}  // namespace freshet::cuda

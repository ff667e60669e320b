// GEMM with quantised weights for up to eight tokens (Hopper), for few rows and many columns: a
// block has one tile of 16 rows.
//
// Each SM runs two blocks. K is cut into eight split-K slices by the number of columns alone, one
// per warp, each with its own pipeline in shared memory. If slices are of equal size and whole
// stages, the code is unrolled: the first stage is decoded before the previous kernel ends, or, for
// formats that gain more by it, one loop takes all stages. Other slices take a loop of stages of
// two to four pieces. Slices are added from left to right; bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_epilogue.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

constexpr int kAtOnce = kStagePieces;
constexpr int64_t kStepCols = kWarps * kAtOnce * 64;  // columns of all warps in a stage

template <class F>
struct Long {
  static constexpr int kPieces = F::kUnit / 64;  // per unit
  static constexpr int kStageBytes = kAtOnce / kPieces * F::kTileBytes;
  static constexpr int kRoom = static_cast<int>(kSharedOfSm / 2) - 6 * 1024;
  static constexpr int kFit = kRoom / kWarps / kStageBytes;
  // More stages don't read memory faster, and the pipeline would take L1 capacity from the
  // activations.
  static constexpr int kStages = kFit < 4 ? kFit : 4;
  static constexpr int kBytes = kWarps * kStages * kStageBytes;
  static constexpr int kAhead = kAheadBytes / 2 / kStageBytes;  // stages in flight
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A warp's pipeline. The barriers of all warps are interleaved stage by stage: landed() checks them
// in the order in which copies are issued.
using WarpPipeline = PipelineOf<uint64_t*, kWarps>;
#endif

// Loads all activations that a warp reads of a token into L1: `pieces` pieces from `first` on.
inline constexpr int kLines = 4;
__device__ __forceinline__ void ask_lines(uint32_t (&lines)[kLines], const uint8_t* act, int first,
                                          int pieces, int lane) {
  constexpr int kBytes = 512, kSector = 32;  // of half a piece
  const uint8_t* from = act + (first * 2 + lane / 2) * kBytes + lane % 2 * kSector;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    if (i * 16 + lane / 2 >= pieces * 2) continue;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(lines[i]) : "l"(from + i * 16 * kBytes));
  }
}

// Formats for which one loop takes all stages, including the first.
template <class F>
inline constexpr bool kOneLoop =
    F::kCode == Code::kQ4_0 || F::kCode == Code::kQ4_K || F::kCode == Code::kQ6_K;

template <class F>
__global__ void __launch_bounds__(256, 2)
    long_kernel(const __grid_constant__ ProductList list, int64_t tokens, int steps) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Long<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[R::kStages][kWarps];
  __shared__ float4 sums[kWarps][32];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x < R::kStages * kWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  uint8_t* ring = rings + warp * R::kStages * R::kStageBytes;
  const WarpPipeline pipe{&full[0][warp]};
  const int tile = static_cast<int>(blockIdx.x);
  const uint8_t* from = list.of[0].weight.data +
                        (static_cast<int64_t>(tile) * kWarps + warp) * (steps * R::kStageBytes);
  const auto ask = [&](int stage) {
    pipe.expect(stage, R::kStageBytes);
    copy_weights(ring + stage * R::kStageBytes, from, R::kStageBytes, pipe.filled(stage));
    from += R::kStageBytes;
  };
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < R::kStages && s < steps; ++s) {
      const int before = s * kWarps + warp - R::kAhead;
      if (warp > 0 && before >= 0) landed(&full[0][0] + before, ended);
      ask(s);
    }
  }
  int left = steps - R::kStages + 1;  // stages not requested yet, plus one
  // Lanes of tokens beyond the last read another token.
  const auto* act = known(reinterpret_cast<const uint4*>(list.of[0].act) +
                          warp * steps * (kAtOnce * 64) + (lane / 4 < tokens ? lane : lane % 4));
  const End to(list, 0, tile, lane, tokens);
  const auto take = [&](const uint8_t* tiles, int i, uint4(&a)[4], Piece& piece) {
    F::template load<FromShared>(tiles + i / R::kPieces * F::kTileBytes, i % R::kPieces, lane,
                                 piece);
    F::decode(piece, i % R::kPieces, lane, a);
  };
  __syncwarp();
  constexpr int kTokens = kOneLoop<F> ? 2 : kAtOnce;  // pieces of activations in registers
  uint4 b[kTokens][1][2];
  const auto load_tokens = [&](int i) {
    b[i % kTokens][0][0] = act[i * 64];
    b[i % kTokens][0][1] = act[i * 64 + 32];
  };
  float before[4];
  float sum[1][4] = {};
  uint32_t lines[kLines] = {};
  const auto begin = [&] {
    wait();
    if (threadIdx.x == 0) ended = 1;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) load_tokens(i);
    if (kOneLoop<F> && tokens == 1) {
      ask_lines(lines, list.of[0].act, warp * steps * kAtOnce, steps * kAtOnce, lane);
    }
    if (warp == 0 && to.real >= 16) to.load(before);
  };
  int step = 0;
  PipelineState at;
  if constexpr (kOneLoop<F>) {
    begin();
  } else {
    uint4 ahead[kAtOnce][4];
    Piece pieces[kAtOnce];
    const auto decode_first = [&] {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        take(ring, i, ahead[i], pieces[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) keep(ahead[i][k]);
      }
    };
    // Warp 0 waits for the previous kernel.
    const bool early = warp > 0 && __all_sync(0xffffffff, landed(pipe.filled(0), ended));
    if (early) decode_first();
    begin();
    if (!early) {
      pipe.wait(at);
      decode_first();
    }
    act += kAtOnce * 64;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      accumulate<F, 1>(sum, ahead[i], b[i], pieces[i], i % R::kPieces);
      load_tokens(i);
    }
    __syncwarp();
    if (--left > 0 && lane == 0) ask(0);
    step = at.stage = 1;
  }
#pragma unroll 1
  for (; step < steps; ++step) {
    const uint8_t* from_stage = ring + at.stage * R::kStageBytes;
    pipe.wait(at);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Piece piece;
      uint4 a[4];
      take(from_stage, i, a, piece);
      accumulate<F, 1>(sum, a, b[i % kTokens], piece, i % R::kPieces);
      // Activations of the next step; after the last step, the same again.
      if (i + kTokens == kAtOnce && step + 1 < steps) act += kAtOnce * 64;
      load_tokens((i + kTokens) % kAtOnce);
    }
    __syncwarp();
    if (--left > 0 && lane == 0) ask(at.stage);
    at.next(R::kStages);
  }
#pragma unroll
  for (uint32_t& line : lines) asm volatile("" ::"r"(line));
  sums[warp][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
  __syncthreads();
  if (warp > 0) return;
  float all[4];
  add_leaves(all, sums);
  to.put(all, before, F::kUp);
#endif
}

// The same for slices of any size, in one loop over stages.
template <class F>
__global__ void __launch_bounds__(256, 2)
    any_long_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Long<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[R::kStages][kWarps];
  __shared__ float4 sums[kWarps][32];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x < R::kStages * kWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  const WarpPipeline pipe{&full[0][warp]};
  const auto place = [&](int slot) { return rings + (warp * R::kStages + slot) * R::kStageBytes; };
  const int tile = static_cast<int>(blockIdx.x);
  const WeightView& w = list.of[0].weight;
  const LeafWalk<F> walk(w.cols, warp);
  const int first = walk.first * R::kPieces;
  const uint8_t* from =
      w.data + tile_at<F>(tile, w.cols) + static_cast<int64_t>(walk.first) * F::kTileBytes;
  int asked = 0;
  const auto ask = [&](int slot) {
    const auto bytes = static_cast<uint32_t>(walk.count(asked) * F::kTileBytes);
    pipe.expect(slot, bytes);
    copy_weights(place(slot), from, bytes, pipe.filled(slot));
    from += bytes;
    ++asked;
  };
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < R::kStages && s < walk.stages; ++s) {
      const int before = s * kWarps + warp - R::kAhead;
      // The slices of other warps may have fewer stages, which must not be waited for.
      if (warp > 0 && before >= 0 && before / kWarps < w.cols / kStepCols) {
        landed(&full[0][0] + before, ended);
      }
      ask(s);
    }
  }
  // Lanes of tokens beyond the last read another token.
  TokenPair b;
  b.act = known(reinterpret_cast<const uint4*>(list.of[0].act) + first * 64 +
                (lane / 4 < tokens ? lane : lane % 4));
  const End to(list, 0, tile, lane, tokens);
  __syncwarp();
  wait();
  if (threadIdx.x == 0) ended = 1;
  b.load(0, 0);
  b.load(1, 1);
  uint32_t lines[kLines] = {};
  if (tokens == 1) {
    ask_lines(lines, list.of[0].act, first, min(walk.units * R::kPieces, kLines * 8), lane);
  }
  float before[4], sum[1][4] = {};
  if (warp == 0 && to.real >= 16) to.load(before);
  int at = 0;
  PipelineState ring_at;
#pragma unroll 1
  for (int stage = 0; stage < walk.stages; ++stage) {
    const int pieces = walk.count(stage) * R::kPieces;
    const int next = stage + 1 < walk.stages ? at + pieces : 0;
    pipe.wait(ring_at);
    add_stage<F>(sum, b, place(ring_at.stage), pieces, at, next, lane);
    at = next;
    __syncwarp();
    if (lane == 0 && asked < walk.stages) ask(ring_at.stage);
    ring_at.next(R::kStages);
  }
#pragma unroll
  for (uint32_t& line : lines) asm volatile("" ::"r"(line));
  sums[warp][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
  __syncthreads();
  if (warp > 0) return;
  float all[4];
  add_leaves(all, sums);
  to.put(all, before, F::kUp);
#endif
}

template <class Kernel, class... A>
int launch_long(const Context& ctx, Kernel kernel, size_t bytes, const ProductList& list,
                A... args) {
  if (const int error = raise_shared(kernel, bytes); error != 0) return error;
  const auto tiles = static_cast<unsigned>(list.of[0].weight.rows / 16);
  return launch(ctx, kernel, dim3(tiles), dim3(256), bytes, list, args...);
}

}  // namespace

template <class F>
int run_long(const Context& ctx, const ProductList& list, int64_t tokens) {
  const int64_t cols = list.of[0].weight.cols;
  if (cols % kStepCols != 0) {
    return launch_long(ctx, any_long_kernel<F>, Long<F>::kBytes, list, tokens);
  }
  return launch_long(ctx, long_kernel<F>, Long<F>::kBytes, list, tokens,
                     static_cast<int>(cols / kStepCols));
}
template int run_long<Q8_0>(const Context&, const ProductList&, int64_t);
template int run_long<Q4_0>(const Context&, const ProductList&, int64_t);
template int run_long<Q4_K>(const Context&, const ProductList&, int64_t);
template int run_long<Q6_K>(const Context&, const ProductList&, int64_t);
template int run_long<MXFP4>(const Context&, const ProductList&, int64_t);
template int run_long<Int4G128>(const Context&, const ProductList&, int64_t);
template int run_long<Int4G32>(const Context&, const ProductList&, int64_t);
template int run_long<Q5_K>(const Context&, const ProductList&, int64_t);
template int run_long<Q3_K>(const Context&, const ProductList&, int64_t);
template int run_long<IQ4_XS>(const Context&, const ProductList&, int64_t);
template int run_long<IQ4_NL>(const Context&, const ProductList&, int64_t);
template int run_long<Q5_0>(const Context&, const ProductList&, int64_t);
template int run_long<Q4_1>(const Context&, const ProductList&, int64_t);
template int run_long<Q5_1>(const Context&, const ProductList&, int64_t);
template int run_long<Q2_K>(const Context&, const ProductList&, int64_t);

}  // namespace freshet::cuda

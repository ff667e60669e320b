// Gate and up GEMMs with quantised weights and a SwiGLU epilogue for up to eight tokens (Hopper);
// also single GEMMs with many rows. Needs 2,048 columns or more.
//
// With 16 warps per SM these GEMMs are limited by latency, not bandwidth, so each SM runs two
// blocks of 16 warps: eight for the split-K slices of gate's tile of 16 rows and eight for those of
// up's, or for two tiles of one GEMM. Blocks are persistent; each warp has its own pipeline of two
// stages. K is cut into slices by the number of columns alone. Slices of the usual sizes
// (UsualLeaves) are unrolled; others take a loop of stages of two to four pieces. Slices are added
// from left to right; bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_epilogue.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

constexpr int kAllWarps = 2 * kWarps;
constexpr int kBeside = 18 * 1024;  // shared memory besides the pipelines: sums, barriers, static

// kLeaf: pieces of a split-K slice, which has two stages, the first of which is the longer one; for
// slices of any size, pieces of two stages.
template <class F, int kLeaf = 2 * kStagePieces>
struct Gate {
  static constexpr int kPieces = F::kUnit / 64;    // per unit
  static constexpr int kAtOnce = (kLeaf + 1) / 2;  // per stage
  static constexpr int kStageBytes = kAtOnce / kPieces * F::kTileBytes;
  static constexpr int64_t kLeafBytes = kLeaf / kPieces * F::kTileBytes;
  static constexpr int64_t kRowBytes = kWarps * kLeafBytes;  // per tile
  static constexpr int kStages = 2;
  static constexpr int kBytes = kAllWarps * kStages * kStageBytes;
  static constexpr int kAhead = kAheadBytes / 2 / kStageBytes;  // stages in flight
  static constexpr bool kFits = (kLeaf == 2 * kStagePieces || kPieces == 1) &&
                                2 * (kBytes + kBeside) <= static_cast<int>(kSharedOfSm);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The epilogue of a round's two tiles; in each round another warp adds up the slices.
template <class F, bool kGated>
__device__ __forceinline__ void end_tiles(const ProductList& list, const Activations& gated,
                                          const float4 (&shared)[2][kWarps][32], int tile,
                                          int round, int64_t tokens) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int leaf = warp % kWarps, up = warp / kWarps;
  if constexpr (!kGated) {
    if (leaf != (round & (kWarps - 1))) return;
    float all[4], before[4];
    add_leaves(all, shared[up]);
    const End to(list, 0, 2 * tile + up, lane, tokens);
    if (to.real >= 16) to.load(before);
    to.put(all, before, F::kUp);
    return;
  }
  if (warp != (round & (kAllWarps - 1))) return;
  float both[2][1][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    add_leaves(both[m][0], shared[m]);
    end_sums<1, F>(list.of[m], both[m], static_cast<int64_t>(tile) * 16 + lane / 4);
  }
  const Activations lanes{gated.data, 0, 0, 0};
  put_gated_lanes(lanes, list.of[0].weight.rows, both[0][0], both[1][0], tile, 0);
}
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A warp's pipeline, interleaved with those of all warps as in gemm_q_sm90_m1_8_long_k.cu.
using GatePipeline = PipelineOf<uint64_t*, kAllWarps>;
#endif

// kGated: tiles of gate and up with a SwiGLU epilogue; otherwise pairs of tiles of one GEMM.
template <class F, bool kGated, int kLeaf>
__global__ void __launch_bounds__(kAllWarps * 32, 2)
    gate_kernel(const __grid_constant__ ProductList list, Activations gated, int64_t tokens,
                int tiles) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Gate<F, kLeaf>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[R::kStages][kAllWarps];
  __shared__ float4 sums[2][2][kWarps][32];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  // Up: 1 for up's tile, or for the second of the pair.
  const int leaf = warp % kWarps, up = warp / kWarps;
  if (threadIdx.x < R::kStages * kAllWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  const int blocks = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  uint8_t* ring = rings + warp * R::kStages * R::kStageBytes;
  const GatePipeline pipe{&full[0][warp]};
  const uint8_t* from = list.of[kGated ? up : 0].weight.data +
                        (kGated ? first : 2 * first + up) * R::kRowBytes + leaf * R::kLeafBytes;
  const int64_t step = (kGated ? 1 : 2) * blocks * R::kRowBytes;
  const auto ask = [&](int stage) {
    const auto bytes =
        static_cast<uint32_t>(stage == 0 ? R::kStageBytes : R::kLeafBytes - R::kStageBytes);
    pipe.expect(stage, bytes);
    copy_weights(ring + stage * R::kStageBytes, from + stage * R::kStageBytes, bytes,
                 pipe.filled(stage));
  };
  // Warp 0, which waits for the previous kernel, doesn't wait for other warps' copies.
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < R::kStages; ++s) {
      const int before = s * kAllWarps + warp - R::kAhead;
      if (warp > 0 && before >= 0) landed(&full[0][0] + before, ended);
      ask(s);
    }
  }
  // Lanes of tokens beyond the last read another token.
  TokenPair b;
  b.act = known(reinterpret_cast<const uint4*>(list.of[0].act) + leaf * kLeaf * 64 +
                (lane / 4 < tokens ? lane : lane % 4));
  __syncwarp();
  wait();
  if (threadIdx.x == 0) ended = 1;
  b.load(0, 0);
  b.load(1, 1);
  int round = 0;
#pragma unroll 1
  for (int tile = first; tile < tiles; tile += blocks, ++round) {
    from += step;
    float sum[1][4] = {};
#pragma unroll
    for (int stage = 0; stage < R::kStages; ++stage) {
      pipe.wait({stage, round & 1});
#pragma unroll
      for (int i = 0; i < R::kAtOnce; ++i) {
        const int n = stage * R::kAtOnce + i;  // within the slice
        if (n >= kLeaf) break;
        Piece piece;
        uint4 a[4];
        F::template load<FromShared>(ring + stage * R::kStageBytes + i / R::kPieces * F::kTileBytes,
                                     i % R::kPieces, lane, piece);
        F::decode(piece, i % R::kPieces, lane, a);
        accumulate<F, 1>(sum, a, b.b[n % 2], piece, i % R::kPieces);
        b.load(n % 2, (n + 2) % kLeaf);
      }
      __syncwarp();
      if (lane == 0 && tile + blocks < tiles) ask(stage);
    }
    if (kLeaf % 2 != 0) b.swap();
    float4(&shared)[2][kWarps][32] = sums[round & 1];
    shared[up][leaf][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
    __syncthreads();
    end_tiles<F, kGated>(list, gated, shared, tile, round, tokens);
  }
#endif
}

// The next copy of a warp.
struct Asking {
  const uint8_t* from;
  int64_t step;  // stride from the end of a tile's slice to the next tile's
  int stage, tile;
};

// The same for any number of columns. A warp requests the stages of its slice in the order in which
// it consumes them, across tiles.
template <class F, bool kGated>
__global__ void __launch_bounds__(kAllWarps * 32, 2)
    any_gate_kernel(const __grid_constant__ ProductList list, Activations gated, int64_t tokens,
                    int tiles) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Gate<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[R::kStages][kAllWarps];
  __shared__ float4 sums[2][2][kWarps][32];
  __shared__ Asking all_asking[kAllWarps];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  // Up: 1 for up's tile, or for the second of the pair.
  const int leaf = warp % kWarps, up = warp / kWarps;
  if (threadIdx.x < R::kStages * kAllWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  const int blocks = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  const WeightView& w = list.of[kGated ? up : 0].weight;
  const LeafWalk<F> walk(w.cols, leaf);
  const GatePipeline pipe{&full[0][warp]};
  const auto place = [&](int slot) { return rings + (warp * R::kStages + slot) * R::kStageBytes; };
  // In shared memory, since only the first lane uses it, once per stage, and registers are scarce.
  Asking& asking = all_asking[warp];
  const auto ask = [&](int slot) {
    if (asking.tile >= tiles) return;
    const auto bytes = static_cast<uint32_t>(walk.count(asking.stage) * F::kTileBytes);
    pipe.expect(slot, bytes);
    copy_weights(place(slot), asking.from, bytes, pipe.filled(slot));
    asking.from += bytes;
    if (++asking.stage < walk.stages) return;
    asking.stage = 0;
    asking.from += asking.step;
    asking.tile += blocks;
  };
  // Warp 0, which waits for the previous kernel, doesn't wait for other warps' copies.
  if (lane == 0) {
    const int64_t leaf_at = static_cast<int64_t>(walk.first) * F::kTileBytes;
    asking = {w.data + tile_at<F>(kGated ? first : 2 * first + up, w.cols) + leaf_at,
              tile_at<F>((kGated ? 1 : 2) * blocks, w.cols) -
                  static_cast<int64_t>(walk.units) * F::kTileBytes,
              0, first};
#pragma unroll 1
    for (int s = 0; s < R::kStages; ++s) {
      const int before = s * kAllWarps + warp - R::kAhead;
      if (warp > 0 && before >= 0) landed(&full[0][0] + before, ended);
      ask(s);
    }
  }
  // Lanes of tokens beyond the last read another token.
  TokenPair b;
  b.act = known(reinterpret_cast<const uint4*>(list.of[0].act) + walk.first * R::kPieces * 64 +
                (lane / 4 < tokens ? lane : lane % 4));
  __syncwarp();
  wait();
  if (threadIdx.x == 0) ended = 1;
  b.load(0, 0);
  b.load(1, 1);
  int round = 0;
  PipelineState ring_at;
#pragma unroll 1
  for (int tile = first; tile < tiles; tile += blocks, ++round) {
    float sum[1][4] = {};
    int at = 0;
#pragma unroll 1
    for (int stage = 0; stage < walk.stages; ++stage) {
      const int pieces = walk.count(stage) * R::kPieces;
      const int next = stage + 1 < walk.stages ? at + pieces : 0;
      pipe.wait(ring_at);
      add_stage<F>(sum, b, place(ring_at.stage), pieces, at, next, lane);
      at = next;
      __syncwarp();
      if (lane == 0) ask(ring_at.stage);
      ring_at.next(R::kStages);
    }
    float4(&shared)[2][kWarps][32] = sums[round & 1];
    shared[up][leaf][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
    __syncthreads();
    end_tiles<F, kGated>(list, gated, shared, tile, round, tokens);
  }
#endif
}

}  // namespace

template <class F, bool kGated, int... kLeafs>
int launch_gate(const Context& ctx, std::integer_sequence<int, kLeafs...>, const ProductList& list,
                int64_t tokens, const Activations& act) {
  const int64_t cols = list.of[0].weight.cols;
  auto kernel = any_gate_kernel<F, kGated>;
  int bytes = Gate<F>::kBytes;
  const auto choose = [&](auto leaf) {
    constexpr int kLeaf = decltype(leaf)::value;
    if constexpr (Gate<F, kLeaf>::kFits) {
      if (cols != kWarps * kLeaf * 64) return;
      kernel = gate_kernel<F, kGated, kLeaf>;
      bytes = Gate<F, kLeaf>::kBytes;
    }
  };
  (choose(std::integral_constant<int, kLeafs>{}), ...);
  if (const int error = raise_shared(kernel, static_cast<size_t>(bytes)); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(2 * ctx.multiprocessors)),
                dim3(kAllWarps * 32), static_cast<size_t>(bytes), list, act, tokens,
                static_cast<int>(list.of[0].weight.rows / (kGated ? 16 : 32)));
}
template <class F>
int run_quant_gate(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                   const Activations& act) {
  return launch_gate<F, true>(ctx, UsualLeaves{}, gate_and_up, tokens, act);
}
template <class F>
int run_many_rows(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_gate<F, false>(ctx, UsualLeaves{}, list, tokens, {});
}
#define FRESHET_GATE(F)                                                                            \
  template int run_quant_gate<F>(const Context&, const ProductList&, int64_t, const Activations&); \
  template int run_many_rows<F>(const Context&, const ProductList&, int64_t);
FRESHET_GATE(Q4_0)
FRESHET_GATE(Q4_K)
FRESHET_GATE(MXFP4)
FRESHET_GATE(Int4G128)
FRESHET_GATE(Int4G32)
FRESHET_GATE(Q5_K)
FRESHET_GATE(Q3_K)
FRESHET_GATE(IQ4_XS)
FRESHET_GATE(IQ4_NL)
FRESHET_GATE(Q5_0)
FRESHET_GATE(Q4_1)
FRESHET_GATE(Q5_1)
#undef FRESHET_GATE

}  // namespace freshet::cuda

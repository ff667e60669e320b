// GEMM with quantised weights for up to eight tokens (Hopper).
//
// Blocks are persistent, two per SM, and loop over tiles of 16 rows, kTiles at a time; each of the
// eight warps takes a split-K slice. The next weights of a warp are always in flight into its own
// pipeline in shared memory, and its next activations into registers, across tiles. Bit-identical
// to gemm_sm80_small_m.cu.
//
// Gate and up may have a SwiGLU epilogue: a block's two tiles are then the same rows of both, and
// the warp that adds the slices applies SwiGLU.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_epilogue.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

// kTiles: row tiles at a time; kSteps: K steps per stage; activations are prefetched one step
// ahead.
template <class F, int kTiles, int kSteps = 1>
struct Ring {
  static constexpr int kPieces = F::kUnit / 64;
  static constexpr int kUnits = kPieces > 2 ? 1 : F::kTileBytes <= 704 ? 4 : 2;  // per step
  static constexpr int kTileBytes = kSteps * kUnits * F::kTileBytes;
  static constexpr int kStageBytes = kTiles * kTileBytes;
  static constexpr int kStages = kSteps > 1                          ? 2
                                 : kStageBytes > 3000 && kTiles == 1 ? 3
                                                                     : 4 / kTiles;
  static constexpr int kBytes = kWarps * kStages * kStageBytes;
  // Blocks per SM.
  static constexpr size_t kOthers = size_t{kTiles} * 8192 + 2048;
  static constexpr int kBlocks = 2 * (kBytes + kOthers) <= kSharedOfSm ? 2 : 1;
  static constexpr int kAhead = kAheadBytes / kBlocks / kStageBytes;  // stages in flight
  static_assert(kAhead >= 1);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A warp's part of K, in units, and which of the block's concurrent tiles it works on.
struct Leaf {
  int parts, index, tile;
  int first, count;
};

template <class F>
__device__ __forceinline__ Work work_of(const ProductArgs& p, int64_t tokens) {
  return {p.weight.data, p.weight.rows, p.weight.cols, p.act,   p.act_chunks, 1,     p.out,
          p.out_stride,  tokens,        p.bias,        p.scale, p.add != 0,   F::kUp};
}
__device__ __forceinline__ int64_t row_tile_of(const ProductList& list, const Leaf& leaf, int index,
                                               int product) {
  return static_cast<int64_t>(index - list.first_block[product]) * (kWarps / leaf.parts) +
         leaf.tile;
}
__device__ __forceinline__ End end_of(const ProductList& list, const Leaf& leaf, int index,
                                      int lane, int64_t tokens) {
  const int i = product_of(list, index);
  return End(list, i, row_tile_of(list, leaf, index, i), lane, tokens);
}

// Adds up a tile's slices from left to right.
template <int kTiles>
__device__ __forceinline__ void add_up(float (&v)[4], const float4 (&sums)[kWarps][kTiles][32],
                                       const Leaf& leaf, int m) {
  const auto add = [&](int l) {
    const float4 part = sums[leaf.tile * leaf.parts + l][m][threadIdx.x % 32];
    const float each[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = l == 0 ? each[i] : __fadd_rn(v[i], each[i]);
  };
  if (leaf.parts == kWarps) {  // all loads at once
#pragma unroll
    for (int l = 0; l < kWarps; ++l) add(l);
  } else if (leaf.parts > 1) {
#pragma unroll 1
    for (int l = 0; l < leaf.parts; ++l) add(l);
  }
}

// SwiGLU of gate's and up's sums of the same rows.
template <class F>
__device__ __forceinline__ void gate_tile(const ProductList& list, const Activations& gated,
                                          float (&sum)[2][1][4], int64_t tile) {
  const int64_t rows = list.of[0].weight.rows;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    end_sums<1, F>(list.of[m], sum[m], tile * 16 + threadIdx.x % 32 / 4);
  }
  const Activations lanes{gated.data, 0, 0, 0};
  if (tile * 16 < rows) put_gated_lanes(lanes, rows, sum[0][0], sum[1][0], tile, 0);
}

// A warp's producer: one of the first lanes per tile.
template <class F, int kTiles, int kSteps>
struct Source {
  using R = Ring<F, kTiles, kSteps>;
  uint8_t* ring;
  Pipeline pipe;
  int index, step;  // the block's tile; stride to its next one
  int second;       // 1: a tile of up, where `index` is gate's
  const uint8_t* from = nullptr;
  int asked = 0;  // units of the tile requested so far
  int stage = 0;

  __device__ __forceinline__ void find(const ProductList& list, const Leaf& leaf) {
    if (index >= list.first_block[list.count]) return;
    const int i = product_of(list, index);
    const WeightView& w = list.of[i + second].weight;
    const int64_t tiles = (w.rows + 15) / 16;
    const int64_t tile =
        static_cast<int64_t>(index - list.first_block[i]) * (kWarps / leaf.parts) + leaf.tile;
    from = w.data + tile_at<F>(tile < tiles ? tile : tiles - 1, w.cols) +
           static_cast<int64_t>(leaf.first) * kUnitStep<F>;
  }
  __device__ __forceinline__ void ask(const ProductList& list, const Leaf& leaf, int lane) {
    const int count = min(kSteps * R::kUnits, leaf.count - asked);
    if (index < list.first_block[list.count]) {
      const auto bytes = static_cast<uint32_t>(count * F::kTileBytes);
      pipe.expect(stage, bytes);
      copy_weights(ring + stage * R::kStageBytes + lane * R::kTileBytes, from, bytes,
                   pipe.filled(stage));
      from += bytes;
    } else {
      pipe.arrive(stage);
    }
    stage = stage + 1 == R::kStages ? 0 : stage + 1;
    asked += count;
    if (asked < leaf.count) return;
    asked = 0;
    index += step;
    find(list, leaf);
  }
};

// Order of the first copies of all warps: warp 0, which then waits for the previous kernel, doesn't
// wait for any other warp; the others take turns after it. Returns the barrier of
// an earlier copy, such that everything between it and the warp's copy `s` may be in flight;
// nullptr if there is none.
template <class R>
__device__ __forceinline__ uint64_t* asked_before(uint64_t (&full)[kWarps][R::kStages], int warp,
                                                  int s) {
  constexpr int kOthers = kWarps - 1;
  const int at = R::kStages + s * kOthers + warp - 1 - R::kAhead;
  if (warp == 0 || at < 0) return nullptr;
  const int other = at - R::kStages;
  return other < 0 ? &full[0][at] : &full[1 + other % kOthers][other / kOthers];
}

#endif

// The kTiles tiles of a block have the same tokens. `gated` has data if gate and up have a SwiGLU
// epilogue.
template <class F, int kTiles, int kSteps>
__global__ void __launch_bounds__(256, 2)
    stream_kernel(const __grid_constant__ ProductList list, Activations gated, int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Ring<F, kTiles, kSteps>;
  constexpr int kAtOnce = R::kUnits * R::kPieces;  // pieces per step
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][R::kStages];
  __shared__ float4 sums[2][kWarps][kTiles][32];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t cols = list.of[0].weight.cols;
  const int units = static_cast<int>((cols + F::kUnit - 1) / F::kUnit), parts = leaves(cols);
  Leaf leaf{parts, warp % parts, warp / parts, 0, 0};
  leaf.first = units * leaf.index / parts;
  leaf.count = units * (leaf.index + 1) / parts - leaf.first;
  const int blocks = static_cast<int>(gridDim.x), end = list.first_block[list.count];
  const bool gates = kTiles == 2 && gated.data != nullptr;
  // Stride from a block's tiles to its next ones.
  const int step = gates ? blocks : kTiles * blocks;
  uint8_t* ring = rings + warp * R::kStages * R::kStageBytes;
  const Pipeline pipe{full[warp]};
  Source<F, kTiles, kSteps> source{ring, pipe,
                                   static_cast<int>(blockIdx.x) + (gates ? 0 : lane * blocks), step,
                                   gates ? lane : 0};
  if (threadIdx.x == 0) ended = 0;
  if (lane == 0) {
    pipe.init_own(R::kStages, kTiles);
  }
  __syncthreads();
  if (lane < kTiles) {
    source.find(list, leaf);
#pragma unroll 1
    for (int s = 0; s < R::kStages; ++s) {
      if (uint64_t* before = asked_before<R>(full, warp, s)) landed(before, ended);
      source.ask(list, leaf, lane);
    }
  }
  // Lanes of tokens beyond the last read another token.
  const int act_lane = leaf.first * R::kPieces * 64 + (lane / 4 < tokens ? lane : lane % 4);
  const auto act_of = [&](int index) {
    return reinterpret_cast<const uint4*>(list.of[product_of(list, index)].act) + act_lane;
  };
  const uint4* first_act = known(act_of(static_cast<int>(blockIdx.x)));  // of the current tile
  const uint4* act = first_act;
  const int pieces = leaf.count * R::kPieces;
  uint4 b[kAtOnce][1][2];
  const auto load_tokens = [&](int i) {
    b[i][0][0] = act[i * 64];
    b[i][0][1] = act[i * 64 + 32];
  };
  End to = end_of(list, leaf, static_cast<int>(blockIdx.x), lane, tokens);
  __syncwarp();
  wait();
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (i < pieces) load_tokens(i);
  }
  if (threadIdx.x == 0) ended = 1;
  PipelineState at;
  int round = 0;
  for (int index = static_cast<int>(blockIdx.x); index < end; index += step, round += kTiles) {
    // KTiles == 1: this warp writes this tile.
    const bool ends = leaf.index == (round & (parts - 1));
    float before[4];
    if (kTiles == 1 && ends && to.real >= 16) to.load(before);
    float sum[kTiles][1][4] = {};
    for (int unit = 0; unit < leaf.count; unit += R::kUnits) {
      // Activations of the next step.
      act += kAtOnce * 64;
      int next_count = pieces - (unit + R::kUnits) * R::kPieces;
      if (next_count <= 0) {
        next_count = index + step < end ? pieces : 0;
        if (list.count > 1 && next_count > 0) first_act = act_of(index + step);
        act = first_act;
      }
      const int step_of = kSteps > 1 ? unit / R::kUnits % kSteps : 0;
      const uint8_t* tiles = ring + at.stage * R::kStageBytes + step_of * (R::kTileBytes / kSteps);
      if (step_of == 0) pipe.wait(at);
      const auto take = [&](int i) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          Piece piece;
          uint4 a[4];
          const uint8_t* tile = tiles + m * R::kTileBytes + i / R::kPieces * F::kTileBytes;
          F::template load<FromShared>(tile, i % R::kPieces, lane, piece);
          F::decode(piece, i % R::kPieces, lane, a);
          accumulate<F, 1>(sum[m], a, b[i], piece, i % R::kPieces);
        }
        if (i < next_count) load_tokens(i);
      };
      if (unit + R::kUnits <= leaf.count) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) take(i);
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (i < (leaf.count - unit) * R::kPieces) {
            take(i);
          } else if (i < next_count) {
            load_tokens(i);
          }
        }
      }
      if (step_of + 1 < kSteps && unit + R::kUnits < leaf.count) continue;
      __syncwarp();
      if (lane < kTiles) source.ask(list, leaf, lane);
      __syncwarp();
      at.next(R::kStages);
    }
    // Slices are added from left to right, for each tile by another warp.
    float4(&shared)[kWarps][kTiles][32] = sums[round / kTiles & 1];
    if (parts > 1) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const float(&v)[4] = sum[m][0];
        shared[warp][m][lane] = make_float4(v[0], v[1], v[2], v[3]);
      }
      __syncthreads();
    }
    if constexpr (kTiles == 1) {
      if (ends) {
        add_up(sum[0][0], shared, leaf, 0);
        to.put(sum[0][0], before, F::kUp);
      }
      if (index + step < end) to = end_of(list, leaf, index + step, lane, tokens);
    } else if (gates) {
      if (!ends) continue;
      add_up(sum[0][0], shared, leaf, 0);
      add_up(sum[1][0], shared, leaf, 1);
      gate_tile<F>(list, gated, sum, row_tile_of(list, leaf, index, 0));
    } else {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const int at = index + m * blocks;
        if (at >= end || leaf.index != ((round + m) & (parts - 1))) continue;
        add_up(sum[m][0], shared, leaf, m);
        const int product = product_of(list, at);
        const Work w = work_of<F>(list.of[product], tokens);
        const int64_t row_tile = row_tile_of(list, leaf, at, product);
        if (row_tile * 16 >= w.rows) continue;
        finish<1>(w, sum[m], row_tile, 0, lane);
      }
    }
  }
#endif
}

template <class F, int kTiles, int kSteps = 1>
int launch_stream(const Context& ctx, const ProductList& list, int64_t tokens,
                  const Activations& gated) {
  using R = Ring<F, kTiles, kSteps>;
  const auto kernel = stream_kernel<F, kTiles, kSteps>;
  if (const int error = raise_shared(kernel, R::kBytes); error != 0) return error;
  const int blocks = list.first_block[list.count], most = R::kBlocks * ctx.multiprocessors;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(blocks < most ? blocks : most)), dim3(256),
                R::kBytes, list, gated, tokens);
}

}  // namespace

template <class F>
int run_stream(const Context& ctx, const ProductList& list, int64_t tokens) {
  static_assert((Ring<F, 2>::kBlocks == 2) == ((kTwoTiles & bit(F::kCode)) != 0));
  bool same = true;
  for (int i = 1; i < list.count; ++i) same = same && list.of[i].act == list.of[0].act;
  // Two tiles at a time if every block has that many.
  if constexpr (Ring<F, 2>::kBlocks == 2) {
    if (same && list.first_block[list.count] > 4 * ctx.multiprocessors) {
      return launch_stream<F, 2>(ctx, list, tokens, {});
    }
  }
  // The fixed cost per stage matters if a block has a single tile, so stages have more steps. (INT4
  // groups get slower.)
  if constexpr (F::kCode == Code::kQ4_0 || F::kCode == Code::kQ4_K) {
    const WeightView& w = list.of[0].weight;  // the same number of columns for all
    if (w.cols / leaves(w.cols) >= 2 * F::kUnit * Ring<F, 1>::kUnits) {
      return launch_stream<F, 1, 2>(ctx, list, tokens, {});
    }
  }
  return launch_stream<F, 1>(ctx, list, tokens, {});
}

// A block takes the same tiles of gate and up.
template <class F>
int run_stream_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                     const Activations& act) {
  if constexpr (Ring<F, 2>::kBlocks == 2) {
    ProductList list = gate_and_up;
    list.count = 1;
    return launch_stream<F, 2>(ctx, list, tokens, act);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

#define FRESHET_STREAM(F)                                                  \
  template int run_stream<F>(const Context&, const ProductList&, int64_t); \
  template int run_stream_gated<F>(const Context&, const ProductList&, int64_t, const Activations&);
FRESHET_STREAM(Q8_0)
FRESHET_STREAM(Q4_0)
FRESHET_STREAM(Q4_K)
FRESHET_STREAM(Q6_K)
FRESHET_STREAM(MXFP4)
FRESHET_STREAM(Int4G128)
FRESHET_STREAM(Int4G32)
FRESHET_STREAM(Q5_K)
FRESHET_STREAM(Q3_K)
FRESHET_STREAM(IQ4_XS)
FRESHET_STREAM(IQ4_NL)
FRESHET_STREAM(Q5_0)
FRESHET_STREAM(Q4_1)
FRESHET_STREAM(Q5_1)
FRESHET_STREAM(Q2_K)
#undef FRESHET_STREAM

}  // namespace freshet::cuda

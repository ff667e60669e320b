// GEMM with quantised weights for 9 to 16 tokens and many rows (Hopper), and gate and up with a
// SwiGLU epilogue.
//
// L2 gives an SM about 25 bytes per cycle, of weights and activations together: if each warp reads
// its own activations (gemm_q_sm90_m9_16.cu), they are most of it. Here the warps of a block take
// different rows, two tiles of 16 each with all of K, and share the activations, which a producer
// warp copies into a pipeline in shared memory. Each warp streams its weights through a pipeline of
// its own, whose first copies are issued before the previous kernel ends. With a SwiGLU epilogue a
// warp takes the same tile of gate and of up, so that a lane has both sums of a feature. Slices are
// added from left to right; bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_q_sm90_m9_16_large_n.h"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

constexpr int kTiles = 2;  // 16-row tiles per warp
constexpr int kThreads = kWarps * 32 + 32;
constexpr int kStagePieces = 4;  // pieces of 64 columns

// NT: token tiles.
template <class F_, int NT_, bool kGate_>
struct WideShape {
  using F = F_;
  static constexpr int NT = NT_;
  static constexpr bool kGate = kGate_;
  // Row units per warp: pairs of tiles, or tiles.
  static constexpr int kAtOnce = kGate ? 1 : kTiles;
  static constexpr int kUnitPieces = F::kUnit / 64, kUnits = kStagePieces / kUnitPieces;
  static constexpr int kTileBytes = kUnits * F::kTileBytes;
  static constexpr int kStageBytes = kTiles * kTileBytes;
  static constexpr int kTokenTileBytes = kStagePieces * 1024;
  static constexpr int kTokensBytes = NT * kTokenTileBytes;
  static constexpr int kTokenStages = 4;
  static constexpr int kRoom = (222 << 10) - kTokenStages * kTokensBytes;
  static constexpr int kMost = kRoom / (kWarps * kStageBytes);
  static constexpr int kStages = kMost < 6 ? kMost : 6;
  static_assert(kStages >= 2);
  static constexpr int kBytes = kTokenStages * kTokensBytes + kWarps * kStages * kStageBytes;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The K steps: up to kStagePieces pieces of a split-K slice each. No slice is empty.
template <class S>
struct Steps {
  int units, leaf = 0, unit = 0, end;  // in units of columns

  __device__ __forceinline__ explicit Steps(int64_t cols)
      : units(static_cast<int>((cols + S::F::kUnit - 1) / S::F::kUnit)), end(units / kWarps) {}
  __device__ __forceinline__ bool more() const { return leaf < kWarps; }
  __device__ __forceinline__ int count() const { return min(S::kUnits, end - unit); }
  __device__ __forceinline__ bool ends_leaf() const { return unit + S::kUnits >= end; }
  __device__ __forceinline__ void next() {
    unit += S::kUnits;
    if (unit < end) return;
    unit = end;
    ++leaf;
    end = units * (leaf + 1) / kWarps;
  }
  __device__ __forceinline__ void restart() {
    leaf = unit = 0;
    end = units / kWarps;
  }
};

// A block's row units, in passes of as many as its warps take at once.
template <class S>
struct WideRows {
  int64_t first;
  int count;
  static constexpr int kPass = kWarps * S::kAtOnce;

  __device__ __forceinline__ int passes() const { return (count + kPass - 1) / kPass; }
  __device__ __forceinline__ int64_t unit(int pass, int warp) const {
    return first + pass * kPass + warp * S::kAtOnce;
  }
  // Tiles of a warp in a pass.
  __device__ __forceinline__ int tiles(int pass, int warp) const {
    const int left = count - pass * kPass - warp * S::kAtOnce;
    return left <= 0 ? 0 : S::kGate ? kTiles : min(kTiles, left);
  }
};

// Producer of a warp's weights: lane t copies tile t.
template <class S>
struct WideStream {
  using F = typename S::F;
  const WideRows<S> rows;
  const uint8_t* weights;  // the lane's tile in the first pass
  int64_t pass_bytes;
  uint8_t* ring;
  Pipeline pipe;
  Steps<S> steps;
  int pass = 0, stage = 0;

  __device__ __forceinline__ bool more(int warp) const {
    return pass < rows.passes() && rows.tiles(pass, warp) > 0;
  }
  __device__ __forceinline__ void ask(int warp, int lane) {
    if (lane < rows.tiles(pass, warp)) {
      const auto bytes = static_cast<uint32_t>(steps.count() * F::kTileBytes);
      pipe.expect(stage, bytes);
      bulk_copy(ring + stage * S::kStageBytes + lane * S::kTileBytes,
                weights + pass * pass_bytes + static_cast<int64_t>(steps.unit) * F::kTileBytes,
                bytes, pipe.filled(stage));
    } else if (lane < kTiles) {
      pipe.arrive(stage);
    }
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    steps.next();
    if (!steps.more()) {
      steps.restart();
      ++pass;
    }
  }
};

// Producer of the activations for all passes (one thread).
template <class S>
__device__ __forceinline__ void bring_tokens(const WideRows<S>& rows, const ProductArgs& p,
                                             int64_t tokens, uint8_t* ring, const Pipeline& pipe) {
  const int tiles = static_cast<int>((tokens + 7) / 8);
  PipelineState at;
  for (int pass = 0; pass < rows.passes(); ++pass) {
    for (Steps<S> steps(p.weight.cols); steps.more(); steps.next()) {
      const auto bytes = static_cast<uint32_t>(steps.count() * S::kUnitPieces * 1024);
      pipe.acquire(at);
      pipe.expect(at.stage, tiles * bytes);
      const uint8_t* from = p.act + static_cast<int64_t>(steps.unit) * S::kUnitPieces * 1024;
      for (int j = 0; j < tiles; ++j) {
        bulk_copy(ring + at.stage * S::kTokensBytes + j * S::kTokenTileBytes,
                  from + j * p.act_chunks * 512, bytes, pipe.filled(at.stage));
      }
      at.next(S::kTokenStages);
    }
  }
}

// sum += a piece, for both tiles.
template <class S>
__device__ __forceinline__ void multiply(float (&sum)[kTiles][S::NT][4], const uint8_t* rows,
                                         const uint8_t* tokens, int piece, int lane) {
  using F = typename S::F;
  uint4 b[S::NT][2];
#pragma unroll
  for (int j = 0; j < S::NT; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      b[j][h] = *reinterpret_cast<const uint4*>(tokens + j * S::kTokenTileBytes + piece * 1024 +
                                                h * 512 + lane * 16);
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    Piece raw;
    uint4 a[4];
    F::template load<FromShared>(rows + t * S::kTileBytes + piece / S::kUnitPieces * F::kTileBytes,
                                 piece % S::kUnitPieces, lane, raw);
    F::decode(raw, piece % S::kUnitPieces, lane, a);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int j = 0; j < S::NT; ++j) {
        const uint4& v = b[j][k / 2];
        mma(sum[t][j], a[k], k % 2 == 0 ? v.x : v.z, k % 2 == 0 ? v.y : v.w);
      }
    }
  }
}

// SwiGLU of a tile's sums, written as activations in fragment order.
template <class S>
__device__ __forceinline__ void put_gated_lanes(const Activations& act, const ProductList& list,
                                                float (&sum)[kTiles][S::NT][4], int64_t tile,
                                                int64_t tokens, int lane) {
  end_sums<S::NT, typename S::F>(list.of[0], sum[0], tile * 16 + lane / 4);
  end_sums<S::NT, typename S::F>(list.of[1], sum[1], tile * 16 + lane / 4);
  const int64_t cols = list.of[0].weight.rows;
#pragma unroll
  for (int j = 0; j < S::NT; ++j) {
    const uint2 v = gated_pairs(sum[0][j], sum[1][j]);
    if (j * 8 >= tokens) continue;
    const int64_t at = activation_at(act, j * 8 + lane / 4, tile * 16 + lane % 4 * 2, cols);
    *reinterpret_cast<uint2*>(act.data + at * 2) = v;
  }
}

template <class S>
__device__ __forceinline__ void walk(WideStream<S>& stream, const ProductList& list, int product,
                                     const uint8_t* ring, const Pipeline& pipe, int64_t tokens,
                                     const Activations& act) {
  using F = typename S::F;
  constexpr int NT = S::NT;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const ProductArgs& p = list.of[product];
  PipelineState at, weights;
  for (int pass = 0; pass < stream.rows.passes(); ++pass) {
    const int count = stream.rows.tiles(pass, warp);
    float total[kTiles][NT][4], sum[kTiles][NT][4] = {};
#pragma unroll
    for (int i = 0; i < kTiles * NT * 4; ++i) {
      total[i / (NT * 4)][i / 4 % NT][i % 4] = -0.0f;  // -0 is the identity of addition
    }
    for (Steps<S> steps(p.weight.cols); steps.more(); steps.next()) {
      const int pieces = steps.count() * S::kUnitPieces;
      pipe.wait(at);
      const uint8_t* from = ring + at.stage * S::kTokensBytes;
      if (count > 0) {
        stream.pipe.wait(weights);
        const uint8_t* rows = stream.ring + weights.stage * S::kStageBytes;
        if (pieces == kStagePieces) {
#pragma unroll
          for (int n = 0; n < kStagePieces; ++n) multiply<S>(sum, rows, from, n, lane);
        } else {
#pragma unroll 1
          for (int n = 0; n < pieces; ++n) multiply<S>(sum, rows, from, n, lane);
        }
        weights.next(S::kStages);
      }
      __syncwarp();
      pipe.release(at.stage);
      at.next(S::kTokenStages);
      if (stream.more(warp)) stream.ask(warp, lane);
      if (!steps.ends_leaf()) continue;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[t][j][i] = __fadd_rn(total[t][j][i], sum[t][j][i]);
            sum[t][j][i] = 0.0f;
          }
        }
      }
    }
    const int64_t tile = stream.rows.unit(pass, warp);
    if constexpr (S::kGate) {
      if (count > 0) put_gated_lanes<S>(act, list, total, tile, tokens, lane);
    } else {
      const Work w{p.weight.data,    p.weight.rows, p.weight.cols, p.act,  p.act_chunks,
                   (tokens + 7) / 8, p.out,         p.out_stride,  tokens, p.bias,
                   p.scale,          p.add != 0,    F::kUp};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t < count) finish<NT>(w, total[t], tile + t, 0, lane);
      }
    }
  }
}
#endif

// share: row units per block. With a SwiGLU epilogue, the list has gate followed by up.
template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    wide_kernel(const __grid_constant__ ProductList list, int64_t tokens, int share,
                const __grid_constant__ Activations act) {
#if __CUDA_ARCH__ >= 900
  using F = typename S::F;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[S::kTokenStages], empty[S::kTokenStages];
  __shared__ uint64_t weights_full[kWarps][S::kStages];
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const WeightView& w = list.of[i].weight;
  const int64_t all = (w.rows + 15) / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * share;
  const WideRows<S> rows{first, static_cast<int>(min(static_cast<int64_t>(share), all - first))};
  const Pipeline pipe{full, empty};
  if (threadIdx.x == 0) pipe.init(S::kTokenStages, kWarps);
  if (warp < kWarps && lane == 0) Pipeline{weights_full[warp]}.init_own(S::kStages, kTiles);
  __syncthreads();
  if (warp == kWarps) {
    wait();
    if (lane == 0) bring_tokens<S>(rows, list.of[i], tokens, rings, pipe);
    return;
  }
  const int64_t step = tile_at<F>(1, w.cols);  // stride to the next tile
  const uint8_t* from = S::kGate && lane == 1 ? list.of[1].weight.data : w.data;
  const int64_t tile = rows.unit(0, warp) + (S::kGate ? 0 : lane);
  WideStream<S> stream{
      rows,
      from + tile * step,
      WideRows<S>::kPass * step,
      rings + S::kTokenStages * S::kTokensBytes + warp * S::kStages * S::kStageBytes,
      {weights_full[warp]},
      Steps<S>(w.cols)};
  for (int s = 0; s < S::kStages && stream.more(warp); ++s) stream.ask(warp, lane);
  wait();
  walk<S>(stream, list, i, rings, pipe, tokens, act);
#endif
}

template <class S>
int launch_wide(const Context& ctx, const ProductList& list, int64_t tokens, int share,
                const Activations& act) {
  static_assert(S::kAtOnce * (S::kGate ? 2 : 1) == kTiles);
  const auto kernel = wide_kernel<S>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(list.first_block[list.count])),
                dim3(kThreads), S::kBytes, list, tokens, share, act);
}

}  // namespace

static_assert(kTiles == kWideTiles && kWarps == kRowWarps);

template <class F>
int run_quant_wide(const Context& ctx, const ProductList& given, int64_t tokens) {
  ProductList list = given;
  const int share = even_share(ctx, list);
  return launch_wide<WideShape<F, 2, false>>(ctx, list, tokens, share, {});
}

template <class F>
int run_quant_wide_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                         const Activations& act) {
  ProductList list = gate_and_up;
  list.count = 1;  // up has the same rows, and isn't counted
  const int share = even_share(ctx, list);
  return launch_wide<WideShape<F, 2, true>>(ctx, list, tokens, share, act);
}

#define FRESHET_WIDE(F)                                                             \
  template int run_quant_wide<F>(const Context&, const ProductList&, int64_t);      \
  template int run_quant_wide_gated<F>(const Context&, const ProductList&, int64_t, \
                                       const Activations&);
FRESHET_WIDE(Q8_0)
FRESHET_WIDE(Q4_0)
FRESHET_WIDE(Q4_K)
FRESHET_WIDE(Q6_K)
FRESHET_WIDE(MXFP4)
FRESHET_WIDE(Int4G128)
FRESHET_WIDE(Int4G32)
FRESHET_WIDE(Q5_K)
FRESHET_WIDE(Q3_K)
FRESHET_WIDE(IQ4_XS)
FRESHET_WIDE(IQ4_NL)
FRESHET_WIDE(Q5_0)
FRESHET_WIDE(Q4_1)
FRESHET_WIDE(Q5_1)
FRESHET_WIDE(Q2_K)
#undef FRESHET_WIDE

}  // namespace freshet::cuda

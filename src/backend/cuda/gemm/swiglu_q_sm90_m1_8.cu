// Gate and up of quantised weights with up to eight tokens on Hopper, of 4,096 columns, and the
// gated unit; and products of as many columns and many rows.
//
// With 16 warps a multiprocessor their latency binds these products, whether weights come from
// memory or from L2. So two blocks have 16 each, eight for the leaves of gate's tile of 16 rows and
// eight for those of up's, or for two tiles of one product. Blocks stay; what a warp reads next is
// on its way into its own ring. The bits are those of gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_epilogue.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kAllWarps = 2 * kWarps, kLeafPieces = 8, kAtOnce = 4;  // pieces of a stage
constexpr int64_t kGateCols = kWarps * kLeafPieces * 64;

template <class F>
struct Gate {
  static constexpr int kPieces = F::kUnit / 64;  // of a unit
  static constexpr int kStageBytes = kAtOnce / kPieces * F::kTileBytes;
  static constexpr int64_t kLeafBytes = kLeafPieces / kPieces * F::kTileBytes;
  static constexpr int64_t kRowBytes = kWarps * kLeafBytes;  // of a tile
  static constexpr int kStages = 2;
  static constexpr int kBytes = kAllWarps * kStages * kStageBytes;
  static constexpr int kAhead = kAheadBytes / 2 / kStageBytes;  // stages in flight
};

// kGated: gate's and up's tiles, which end in the gated unit; or else pairs of tiles of a product.
template <class F, bool kGated>
__global__ void __launch_bounds__(kAllWarps * 32, 2)
    gate_kernel(const __grid_constant__ ProductList list, Activations gated, int64_t tokens,
                int tiles) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Gate<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[R::kStages][kAllWarps];
  __shared__ float4 sums[2][2][kWarps][32];
  __shared__ volatile int ended;  // the kernel in front
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int leaf = warp % kWarps, up = warp / kWarps;  // or the second of the pair
  if (threadIdx.x < R::kStages * kAllWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  const int blocks = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  uint8_t* ring = rings + warp * R::kStages * R::kStageBytes;
  uint64_t* barrier = &full[0][warp];
  const uint8_t* from = list.of[kGated ? up : 0].weight.data +
                        (kGated ? first : 2 * first + up) * R::kRowBytes + leaf * R::kLeafBytes;
  const int64_t step = (kGated ? 1 : 2) * blocks * R::kRowBytes;
  const auto ask = [&](int stage) {
    barrier_expect(barrier + stage * kAllWarps, R::kStageBytes);
    copy_weights(ring + stage * R::kStageBytes, from + stage * R::kStageBytes, R::kStageBytes,
                 barrier + stage * kAllWarps);
  };
  // Warp 0, which waits for the kernel in front, does not wait for any other's copies.
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < R::kStages; ++s) {
      const int before = s * kAllWarps + warp - R::kAhead;
      if (warp > 0 && before >= 0) landed(&full[0][0] + before, ended);
      ask(s);
    }
  }
  // Lanes of tokens that are not there read another's.
  const auto* act = known(reinterpret_cast<const uint4*>(list.of[0].act) + leaf * kLeafPieces * 64 +
                          (lane / 4 < tokens ? lane : lane % 4));
  __syncwarp();
  wait();
  if (threadIdx.x == 0) ended = 1;
  uint4 b[2][1][2];
  const auto load_tokens = [&](int i) {
    b[i % 2][0][0] = act[i % kLeafPieces * 64];
    b[i % 2][0][1] = act[i % kLeafPieces * 64 + 32];
  };
  load_tokens(0);
  load_tokens(1);
  int round = 0;
#pragma unroll 1
  for (int tile = first; tile < tiles; tile += blocks, ++round) {
    from += step;
    float sum[1][4] = {};
#pragma unroll
    for (int stage = 0; stage < R::kStages; ++stage) {
      barrier_wait(barrier + stage * kAllWarps, round & 1);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        Piece piece;
        uint4 a[4];
        F::template load<FromShared>(ring + stage * R::kStageBytes + i / R::kPieces * F::kTileBytes,
                                     i % R::kPieces, lane, piece);
        F::decode(piece, i % R::kPieces, lane, a);
        accumulate<F, 1>(sum, a, b[i % 2], piece, i % R::kPieces);
        load_tokens(stage * kAtOnce + i + 2);
      }
      __syncwarp();
      if (lane == 0 && tile + blocks < tiles) ask(stage);
    }
    float4(&shared)[2][kWarps][32] = sums[round & 1];
    shared[up][leaf][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
    __syncthreads();
    if constexpr (!kGated) {
      if (leaf != (round & (kWarps - 1))) continue;
      float all[4], before[4];
      add_leaves(all, shared[up]);
      const End to(list, 0, 2 * tile + up, lane, tokens);
      if (to.real >= 16) to.load(before);
      to.put(all, before, F::kUp);
      continue;
    }
    if (warp != (round & (kAllWarps - 1))) continue;
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
}

}  // namespace

static_assert(kGateCols == kOneShotCols);

template <class F, bool kGated>
int launch_gate(const Context& ctx, const ProductList& list, int64_t tokens,
                const Activations& act) {
  using R = Gate<F>;
  const auto kernel = gate_kernel<F, kGated>;
  if (const int error = raise_shared(kernel, R::kBytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(2 * ctx.multiprocessors)),
                dim3(kAllWarps * 32), R::kBytes, list, act, tokens,
                static_cast<int>(list.of[0].weight.rows / (kGated ? 16 : 32)));
}
template <class F>
int run_quant_gate(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                   const Activations& act) {
  return launch_gate<F, true>(ctx, gate_and_up, tokens, act);
}
template <class F>
int run_many_rows(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_gate<F, false>(ctx, list, tokens, {});
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

// GEMM with quantised weights for 9 to 16 tokens (Hopper), by mma.sync with operands in registers.
//
// Every SM runs one block, and all blocks take the same number of tiles of 16 rows, with all of K.
// Two warps share a split-K slice, because the kernel is limited by latency. Each streams its
// weights through a pipeline of its own, R tiles at a time, whose first copies are issued before
// the previous kernel ends. Slices are added from left to right; bit-identical to
// gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_sm90_small_m.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

template <class F_>
struct Stage {
  using F = F_;
  static constexpr int kUnitPieces = F::kUnit / 64;
  static constexpr int kPieces = F::kTileBytes > 1000 && kUnitPieces == 1 ? 2 : 4;
  static constexpr int kTileBytes = kPieces / kUnitPieces * F::kTileBytes;
};
template <class F, int R>
struct FewShape : Stage<F>,
                  FewSums<2, R, 2>,
                  FewRings<FewSums<2, R, 2>, R * Stage<F>::kTileBytes, 4> {};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
inline constexpr int kAhead = 2;  // pieces of activations in registers

// A warp's slice of the block's rows: all pieces of the slice for its own R of each kTiles tiles.
// Lane t copies tile t.
template <class S>
struct FewStream {
  using F = typename S::F;
  const uint8_t* weights;  // the slice's first weights
  int64_t step;            // stride to the next tile
  Share share;
  int units;  // units in the slice
  int mine;   // first tile of the first group
  uint8_t* ring;
  Pipeline pipe;
  int group = 0, unit = 0, stage = 0;  // of the next copy

  __device__ __forceinline__ int tiles(int of) const {
    return max(0, min(S::R, share.count - of * S::kTiles - mine));
  }
  __device__ __forceinline__ bool more() const { return tiles(group) > 0 && units > 0; }
  __device__ __forceinline__ void ask(int lane) {
    constexpr int kUnits = S::kPieces / S::kUnitPieces;
    if (lane < tiles(group)) {
      const auto bytes = static_cast<uint32_t>(min(kUnits, units - unit) * F::kTileBytes);
      pipe.expect(stage, bytes);
      bulk_copy(
          ring + stage * S::kStageBytes + lane * S::kTileBytes,
          weights + (share.first + group * S::kTiles + mine + lane) * step + unit * F::kTileBytes,
          bytes, pipe.filled(stage));
    } else if (lane < S::R) {
      pipe.arrive(stage);
    }
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    unit += kUnits;
    if (unit >= units) unit = 0, ++group;
  }
};

// sum += a piece. Adjacent MMAs have independent accumulators, so none waits for the previous one.
template <int NT>
__device__ __forceinline__ void multiply(float (&sum)[NT][4], const uint4 (&a)[4],
                                         const uint4 (&b)[NT][2]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const uint4& v = b[j][k / 2];
      mma(sum[j], a[k], k % 2 == 0 ? v.x : v.z, k % 2 == 0 ? v.y : v.w);
    }
  }
}
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// A block's share of GEMM i.
template <class S>
__device__ __forceinline__ void multiply_share(const ProductList& list, int i, int64_t tokens,
                                               int share) {
  using F = typename S::F;
  constexpr int NT = S::NT, R = S::R;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[S::kAllWarps][S::kStages];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const ProductArgs& p = list.of[i];
  const Work w{p.weight.data,    p.weight.rows, p.weight.cols, p.act,  p.act_chunks,
               (tokens + 7) / 8, p.out,         p.out_stride,  tokens, p.bias,
               p.scale,          p.add != 0,    F::kUp};
  const auto units = static_cast<int>((w.cols + F::kUnit - 1) / F::kUnit);
  const int64_t tiles = (w.rows + 15) / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * share;
  const int leaf = warp / S::kPair;
  const int begin = units * leaf / kWarps;
  FewStream<S> stream{w.weights + begin * F::kTileBytes,
                      tile_at<F>(1, w.cols),
                      {first, static_cast<int>(min(static_cast<int64_t>(share), tiles - first))},
                      units * (leaf + 1) / kWarps - begin,
                      warp % S::kPair * R,
                      rings + warp * S::kStages * S::kStageBytes,
                      {full[warp]}};
  if (lane == 0) {
    stream.pipe.init_own(S::kStages, R);
  }
  __syncwarp();
  for (int s = 0; s < S::kStages && stream.more(); ++s) stream.ask(lane);
  wait();
  const uint4* act[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int64_t tile = j < w.act_tiles ? j : w.act_tiles - 1;
    act[j] = reinterpret_cast<const uint4*>(w.act) + tile * w.act_chunks * 32 +
             static_cast<int64_t>(begin) * S::kUnitPieces * 64 + lane;
  }
  const int pieces = stream.units * S::kUnitPieces;
  uint4 b[kAhead][NT][2];
  const auto load_first = [&] {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d < pieces) load_tokens<NT>(b[d], act, d);
    }
  };
  load_first();
  PipelineState at;
  for (int group = 0; group * S::kTiles < stream.share.count; ++group) {
    const int count = stream.tiles(group);
    float sum[R][NT][4] = {};
    for (int k = 0; count > 0 && k < pieces; k += S::kPieces) {
      stream.pipe.wait(at);
      const uint8_t* rows = stream.ring + at.stage * S::kStageBytes;
#pragma unroll
      for (int n = 0; n < S::kPieces; ++n) {
        if (k + n >= pieces) break;
#pragma unroll
        for (int t = 0; t < R; ++t) {
          if (t >= count) break;
          Piece piece;
          uint4 a[4];
          const uint8_t* tile = rows + t * S::kTileBytes + n / S::kUnitPieces * F::kTileBytes;
          F::template load<FromShared>(tile, n % S::kUnitPieces, lane, piece);
          F::decode(piece, n % S::kUnitPieces, lane, a);
          multiply<NT>(sum[t], a, b[n % kAhead]);
        }
        if (k + n + kAhead < pieces) load_tokens<NT>(b[n % kAhead], act, k + n + kAhead);
      }
      __syncwarp();
      if (stream.more()) stream.ask(lane);
      at.next(S::kStages);
    }
    if ((group + 1) * S::kTiles < stream.share.count) load_first();
    add_leaves<S>(w, sum, reinterpret_cast<float4*>(rings + S::kRings), first + group * S::kTiles,
                  min(S::kTiles, stream.share.count - group * S::kTiles));
  }
}
#endif

// GEMMs in S's format, or in T's.
template <class S, class T = S>
__global__ void __launch_bounds__(S::kAllWarps * 32, 1)
    few_kernel(const __grid_constant__ ProductList list, int64_t tokens, int share) {
#if __CUDA_ARCH__ >= 900
  let_next_start();
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  if (S::F::kCode != T::F::kCode && list.of[i].weight.code == T::F::kCode) {
    multiply_share<T>(list, i, tokens, share);
  } else {
    multiply_share<S>(list, i, tokens, share);
  }
#endif
}

template <class S>
int launch_few(const Context& ctx, const ProductList& list, int64_t tokens, int share) {
  return launch_shares<S>(ctx, few_kernel<S>, list, tokens, share);
}

}  // namespace

template <class F>
int run_quant_few(const Context& ctx, const ProductList& given, int64_t tokens) {
  ProductList list = given;
  const int share = even_share(ctx, list);
  if constexpr (F::kTileBytes < 3000) {  // two tiles still leave room for two stages
    if (share > 2) return launch_few<FewShape<F, 2>>(ctx, list, tokens, share);
  }
  return launch_few<FewShape<F, 1>>(ctx, list, tokens, share);
}

template <class F>
int run_quant_few_pair(const Context& ctx, const ProductList& given, int64_t tokens) {
  using S = FewShape<F, (F::kTileBytes < 3000) ? 2 : 1>;
  using T = FewShape<Q6_K, 1>;
  static_assert(S::kAllWarps == T::kAllWarps);
  using Larger = std::conditional_t<(S::kBytes >= T::kBytes), S, T>;
  ProductList list = given;
  const int share = even_share(ctx, list);
  return launch_shares<Larger>(ctx, few_kernel<S, T>, list, tokens, share);
}

template int run_quant_few_pair<Q4_K>(const Context&, const ProductList&, int64_t);
template int run_quant_few_pair<Q5_K>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q8_0>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q4_0>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q4_K>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q6_K>(const Context&, const ProductList&, int64_t);
template int run_quant_few<MXFP4>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Int4G128>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Int4G32>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q5_K>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q3_K>(const Context&, const ProductList&, int64_t);
template int run_quant_few<IQ4_XS>(const Context&, const ProductList&, int64_t);
template int run_quant_few<IQ4_NL>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q5_0>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q4_1>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q5_1>(const Context&, const ProductList&, int64_t);
template int run_quant_few<Q2_K>(const Context&, const ProductList&, int64_t);

}  // namespace freshet::cuda

// GEMM with BF16 weights for at most 32 tokens (Hopper).
//
// It is limited by bandwidth: every SM runs one block, and all blocks take the same number of tiles
// of 16 rows with all of K, so that no sums are exchanged between blocks. Each of a block's eight
// warps takes one split-K slice and streams it through a pipeline of its own, several tiles per
// copy, since copies of single tiles are too slow. The copies that fit the pipelines are issued
// before the previous kernel ends, a few at a time (prefetch_weights.cuh). Slices are added from
// left to right; bit-identical to gemm_sm80_small_m.cu.
//
// For up to 16 tokens this kernel also runs gate and up with a SwiGLU epilogue: groups of gate's
// tiles and of up's alternate, and the warp that adds the slices applies SwiGLU. The code is kept
// short: the kernels of a layer follow each other so closely that instruction fetches matter.
#include "backend/cuda/gemm/gemm_sm90_small_m.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

// NT: token tiles; R: row tiles at a time; kMost: stages of a warp's pipeline, limited so that the
// block fits on an SM beside one of decode_cluster_sm90.cu.
template <int NT, int R, int kMost>
struct Bf16FewShape : FewSums<NT, R>, FewRings<FewSums<NT, R>, R * BF16::kTileBytes, kMost> {};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Weights beyond the pipeline are prefetched to L2, at the rate of memory.
constexpr int kNear = 2;        // pieces
constexpr int kClockBytes = 3;  // bytes per warp and clock cycle

template <int NT>
inline constexpr int kAhead = NT == 2 ? 1 : 2;  // pieces of activations in registers

// A warp's slice of the block's rows: all units of the slice for R tiles, then for the next R
// tiles, or first for the same R tiles of the other matrix. One lane issues the copies.
template <int NT, int R, int kMatrices, int kMost>
struct Bf16Stream {
  using S = Bf16FewShape<NT, R, kMost>;
  const uint8_t* weights[kMatrices];
  int64_t cols;
  Share share;
  int first, units;  // units in the slice
  uint32_t ring;
  PipelineAt pipe;
  int group = 0, unit = 0, stage = 0;  // of the next copy
  const uint8_t* from = nullptr;
  int64_t jump = 0;  // offset of the rest of a group that crosses a panel
  uint32_t bytes = 0, rest = 0;

  __device__ __forceinline__ int groups() const { return (share.count + R - 1) / R * kMatrices; }
  __device__ __forceinline__ bool more() const { return group < groups() && units > 0; }
  __device__ __forceinline__ int64_t tile(int of) const { return share.first + of / kMatrices * R; }
  __device__ __forceinline__ int tiles(int of) const {
    return min(R, share.count - of / kMatrices * R);
  }
  __device__ __forceinline__ void find() {
    const int64_t at = tile(group);
    const int count = tiles(group), here = min(count, static_cast<int>(8 - at % 8));
    const uint8_t* matrix = kMatrices == 2 && group % 2 == 1 ? weights[kMatrices - 1] : weights[0];
    from = matrix + tile_at<BF16>(at, cols) + first * kUnitStep<BF16>;
    jump = tile_at<BF16>(at + here, cols) - tile_at<BF16>(at, cols);
    bytes = static_cast<uint32_t>(here * BF16::kTileBytes);
    rest = static_cast<uint32_t>((count - here) * BF16::kTileBytes);
  }
  __device__ __forceinline__ void ask(uint64_t policy) {
    const uint32_t to = ring + static_cast<uint32_t>(stage * S::kStageBytes);
    const uint32_t barrier = pipe.filled(stage);
    pipe.expect(stage, bytes + rest);
    copy_weights(to, from, bytes, barrier, policy);
    if (rest != 0) copy_weights(to + bytes, from + jump, rest, barrier, policy);
    stage = stage + 1 < S::kStages ? stage + 1 : 0;
    advance();
  }
  // Prefetches to L2 only.
  __device__ __forceinline__ void bring_near() {
    const auto bring = [](const uint8_t* p, uint32_t n) {
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(n) : "memory");
    };
    bring(from, bytes);
    if (rest != 0) bring(from + jump, rest);
    advance();
  }

 private:
  __device__ __forceinline__ void advance() {
    from += kUnitStep<BF16>;
    if (++unit == units) {
      unit = 0;
      ++group;
      if (more()) find();
    }
  }
};
#endif

// Order of the first copies of all warps: warp 0, which then waits for the previous kernel, doesn't
// wait for any other warp; the others take turns after it. Returns the barrier of
// an earlier copy, such that everything between it and the warp's copy `s` may be in flight;
// nullptr if there is none.
template <class S>
__device__ __forceinline__ uint64_t* asked_before(uint64_t (&full)[kWarps][S::kStages], int warp,
                                                  int s) {
  constexpr int kOthers = kWarps - 1;
  const int at = S::kStages + s * kOthers + warp - 1 - kAheadBytes / S::kStageBytes;
  if (warp == 0 || at < 0) return nullptr;
  const int other = at - S::kStages;
  return other < 0 ? &full[0][at] : &full[1 + other % kOthers][other / kOthers];
}

// Few registers, so that the block starts beside the small kernel before it. kMatrices: 2 for gate
// and up with a SwiGLU epilogue into `gated`.
template <int NT, int R, int kMatrices, int kMost>
__global__ void __launch_bounds__(256, NT <= 2 ? 2 : 1)
    few_kernel(const __grid_constant__ ProductList list, Activations gated, int64_t tokens,
               int share) {
#if __CUDA_ARCH__ >= 900
  using S = Bf16FewShape<NT, R, kMost>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][S::kStages];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const ProductArgs& p = list.of[i];
  const Work w{p.weight.data, p.weight.rows, p.weight.cols, p.act,  p.act_chunks, (tokens + 7) / 8,
               p.out,         p.out_stride,  tokens,        p.bias, p.scale,      p.add != 0};
  const auto units = static_cast<int>((w.cols + 63) / 64);
  const int64_t tiles = (w.rows + 15) / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * share;
  const int begin = units * warp / kWarps;
  const uint8_t* ring = rings + warp * S::kStages * S::kStageBytes;
  Bf16Stream<NT, R, kMatrices, kMost> stream{
      {w.weights},
      w.cols,
      {first, static_cast<int>(min(static_cast<int64_t>(share), tiles - first))},
      begin,
      units * (warp + 1) / kWarps - begin,
      shared_address(ring),
      {shared_address(full[warp])}};
  if constexpr (kMatrices == 2) stream.weights[1] = list.of[1].weight.data;
  const uint64_t policy = read_once();
  const Pipeline pipe{full[warp]};
  if (threadIdx.x == 0) ended = 0;
  if (lane == 0) {
    pipe.init_own(S::kStages);
  }
  __syncthreads();
  if (lane == 0) {
    if (stream.more()) stream.find();
    for (int s = 0; s < S::kStages && stream.more(); ++s) {
      if (uint64_t* before = asked_before<S>(full, warp, s)) landed(before, ended);
      stream.ask(policy);
    }
    if (NT == 1 && warp > 0) {
      landed(&full[warp][S::kStages - 1], ended);
      auto next = stream;
      int64_t at = clock64();
      for (int n = 0; n < kNear && next.more() && ended == 0; ++n) {
        next.bring_near();
        for (at += S::kStageBytes / kClockBytes; clock64() < at && ended == 0;) {
        }
      }
    }
  }
  __syncwarp();
  auto* shared = reinterpret_cast<float4*>(rings + S::kRings);
  // Lanes of tokens beyond the last read another token.
  const int act_lane = NT > 1 || lane / 4 < tokens ? lane : lane % 4;
  wait();
  if (threadIdx.x == 0) ended = 1;
  const uint4* act[NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int64_t tile = j < w.act_tiles ? j : w.act_tiles - 1;
    act[j] =
        reinterpret_cast<const uint4*>(w.act) + tile * w.act_chunks * 32 + begin * 64 + act_lane;
  }
  uint4 b[kAhead<NT>][NT][2];
  const auto load_first = [&] {
#pragma unroll
    for (int d = 0; d < kAhead<NT>; ++d) {
      if (d < stream.units) load_tokens<NT>(b[d], act, d);
    }
  };
  load_first();
  PipelineState at;
  float gates[NT / S::kTogether][4];
  const int groups = stream.groups();
  for (int group = 0; group < groups; ++group) {
    const int count = stream.tiles(group);
    const int64_t tile = stream.tile(group);
    Before before;
    if constexpr (NT == 1 && kMatrices == 1) {
      if (w.add && warp < count) before.load(w, tile + warp, 0, lane);
    }
    float sum[R][NT][4] = {};
    for (int k = 0; k < stream.units; k += kAhead<NT>) {
#pragma unroll
      for (int d = 0; d < kAhead<NT>; ++d) {
        if (k + d >= stream.units) break;
        pipe.wait(at);
        const uint8_t* rows = ring + at.stage * S::kStageBytes;
        if constexpr (NT == 1) {
          // Tiles beyond the last are summed as well; the independent MMA chains overlap.
          Piece piece[R];
#pragma unroll
          for (int t = 0; t < R; ++t) {
            BF16::load<FromShared>(rows + t * BF16::kTileBytes, 0, lane, piece[t]);
          }
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const uint4& v = b[d][0][n / 2];
#pragma unroll
            for (int t = 0; t < R; ++t) {
              mma(sum[t][0], piece[t].q[n], n % 2 == 0 ? v.x : v.z, n % 2 == 0 ? v.y : v.w);
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < R; ++t) {
            if (t >= count) break;
            Piece piece;
            uint4 a[4];
            BF16::load<FromShared>(rows + t * BF16::kTileBytes, 0, lane, piece);
            BF16::decode(piece, 0, lane, a);
            accumulate<BF16, NT>(sum[t], a, b[d], piece, 0);
          }
        }
        if (k + d + kAhead<NT> < stream.units) load_tokens<NT>(b[d], act, k + d + kAhead<NT>);
        __syncwarp();
        if (lane == 0 && stream.more()) stream.ask(policy);
        at.next(S::kStages);
      }
    }
    if (group + 1 < groups) load_first();
    if constexpr (kMatrices == 1 && NT == 1) {
      add_leaves<S>(sum, shared, count, [&](float(&all)[1][4], int t, int, int) {
        if (w.add) {
          finish<1>(w, all, tile + t, 0, lane, before.v);
        } else {
          finish<1>(w, all, tile + t, 0, lane);
        }
      });
    } else if constexpr (kMatrices == 1) {
      add_leaves<S>(w, sum, shared, tile, count);
    } else {
      add_leaves<S>(sum, shared, count, [&](float(&all)[1][4], int t, int j, int turn) {
        end_sums<1>(list.of[group % 2], all, (tile + t) * 16 + lane / 4);
        if (group % 2 == 1) {
          if (j * 8 < tokens) put_gated_lanes(gated, w.rows, gates[turn], all[0], tile + t, j);
        } else {
#pragma unroll
          for (int n = 0; n < 4; ++n) gates[turn][n] = all[0][n];
        }
      });
    }
  }
#endif
}

template <int NT, int R, int kMatrices, int kMost = 1 << 10>
int launch_few(const Context& ctx, const ProductList& list, int64_t tokens, int share,
               const Activations& gated) {
  using S = Bf16FewShape<NT, R, kMost>;
  const auto kernel = few_kernel<NT, R, kMatrices, kMost>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(list.first_block[list.count])), dim3(256),
                S::kBytes, list, gated, tokens, share);
}

template <int NT>
int launch_few(const Context& ctx, const ProductList& list, int64_t tokens, int share,
               const Activations& gated) {
  if constexpr (NT <= 2) {
    if (gated.data != nullptr) return launch_few<NT, 4, 2>(ctx, list, tokens, share, gated);
  }
  // Deep pipelines: with 8 tokens, attention leaves no shared memory for them.
  if constexpr (NT == 1) {
    if (share == 1 && tokens == 1) return launch_few<NT, 1, 1, 8>(ctx, list, tokens, share, gated);
    if (share == 3 && tokens == 1) return launch_few<NT, 2, 1, 4>(ctx, list, tokens, share, gated);
  }
  if (share <= 2) return launch_few<NT, 2, 1>(ctx, list, tokens, share, gated);
  if (share == 3) return launch_few<NT, 3, 1>(ctx, list, tokens, share, gated);
  return launch_few<NT, 4, 1>(ctx, list, tokens, share, gated);
}

int launch_few(const Context& ctx, ProductList list, int64_t tokens, const Activations& gated) {
  const int share = even_share(ctx, list);
  if (tokens <= 8) return launch_few<1>(ctx, list, tokens, share, gated);
  if (tokens <= 16) return launch_few<2>(ctx, list, tokens, share, gated);
  return launch_few<4>(ctx, list, tokens, share, gated);
}

}  // namespace

int run_few(const Context& ctx, const ProductList& list, int64_t tokens) {
  return launch_few(ctx, list, tokens, {});
}

// Blocks take the same tiles of gate and of up.
int run_few_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                  const Activations& act) {
  ProductList list = gate_and_up;
  list.count = 1;
  return launch_few(ctx, list, tokens, act);
}

}  // namespace freshet::cuda

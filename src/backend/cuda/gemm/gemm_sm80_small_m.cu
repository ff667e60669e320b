// GEMM with packed weights: out = W x, with weights on the 16-row side of mma and tokens on the
// other. Its order of sums is the reference for all other GEMM kernels.
//
// The number of columns alone decides how K is cut into slices, one per warp, whose sums are added
// from left to right. Neither the number of tokens nor their positions change a sum, so a row has
// the same bits in every batch. On Hopper each warp streams its weights through a pipeline of its
// own, whose first copies are issued before the previous kernel ends.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda {
namespace {

// A warp's own pipeline of kStages pieces of its weights in shared memory, filled by TMA bulk
// copies: data in flight needs no registers, and a block's first pieces are requested before the
// previous kernel ends.
template <class F>
struct WarpStages {
  static constexpr int kStages = 4;
  static constexpr int kUnits = F::kTileBytes <= 600    ? 4
                                : F::kTileBytes <= 1100 ? 2
                                                        : 1;  // units per stage
  static_assert(kUnits == 1 || kPanelTiles<F> == 1, "a stage is one copy");
  static constexpr int kStageBytes = kUnits * F::kTileBytes;
  static constexpr int kBytes = kWarps * kStages * kStageBytes;
};

// The sum of a warp's slice: pieces [first, last) of `panel`. `tokens` returns the activations once
// the previous kernel has ended.
template <class F, int NT, class Tokens>
__device__ __forceinline__ void sum_leaf(float (&sum)[NT][4], const uint8_t* panel, int first,
                                         int last, const Tokens& tokens) {
  constexpr int kPieces = F::kUnit / 64;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint4* act[NT];
#if __CUDA_ARCH__ >= 900
  using R = WarpStages<F>;
  extern __shared__ __align__(128) uint8_t rings[];
  __shared__ uint64_t full[kWarps][R::kStages];
  constexpr int kStagePieces = R::kUnits * kPieces;
  const int warp = static_cast<int>(threadIdx.x / 32);
  uint8_t* ring = rings + warp * R::kStages * R::kStageBytes;
  const int units = (last - first) / kPieces;
  const uint8_t* source = panel + static_cast<int64_t>(first / kPieces) * kUnitStep<F>;
  const Pipeline pipe{full[warp]};
  const auto issue = [&](int chunk) {
    const int count = min(R::kUnits, units - chunk * R::kUnits), stage = chunk % R::kStages;
    const auto bytes = static_cast<uint32_t>(count * F::kTileBytes);
    pipe.expect(stage, bytes);
    bulk_copy(ring + stage * R::kStageBytes,
              source + static_cast<int64_t>(chunk) * R::kUnits * kUnitStep<F>, bytes,
              pipe.filled(stage));
  };
  if (lane == 0) {
    pipe.init_own(R::kStages);
    for (int s = 0; s < R::kStages; ++s) {
      if (s * R::kUnits < units) issue(s);
    }
  }
  __syncwarp();
  wait();
  tokens(act);
  if (first == last) return;
  uint4 b[NT][2], next[NT][2];
  load_tokens(b, act, first);
#pragma unroll 2
  for (int i = first; i < last; ++i) {
    const int at = i - first, chunk = at / kStagePieces;
    if (at % kStagePieces == 0) {
      pipe.wait({chunk % R::kStages, chunk / R::kStages & 1});
    }
    if (i + 1 < last) load_tokens(next, act, i + 1);
    const uint8_t* tile =
        ring + chunk % R::kStages * R::kStageBytes + at % kStagePieces / kPieces * F::kTileBytes;
    Piece piece;
    uint4 a[4];
    F::template load<FromShared>(tile, at % kPieces, lane, piece);
    F::decode(piece, at % kPieces, lane, a);
    accumulate<F, NT>(sum, a, b, piece, at % kPieces);
    if (at % kStagePieces == kStagePieces - 1) {
      __syncwarp();
      if (lane == 0 && (chunk + R::kStages) * R::kUnits < units) issue(chunk + R::kStages);
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      b[j][0] = next[j][0];
      b[j][1] = next[j][1];
    }
  }
#else
  wait();
  tokens(act);
  for (int i = first; i < last; ++i) {
    uint4 b[NT][2], a[4];
    Piece piece;
    const uint8_t* tile = panel + static_cast<int64_t>(i / kPieces) * kUnitStep<F>;
    F::template load<FromMemory>(tile, i % kPieces, lane, piece);
    load_tokens(b, act, i);
    F::decode(piece, i % kPieces, lane, a);
    accumulate<F, NT>(sum, a, b, piece, i % kPieces);
  }
#endif
}

// Block `block` of a GEMM (kWarps warps), for token tiles from token_tile on.
template <class F, int NT>
__device__ __forceinline__ void multiply(const Work& w, int64_t block, int64_t token_tile) {
  constexpr int kPieces = F::kUnit / 64;
  __shared__ float shared[kWarps][NT * 4][32];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const int parts = leaves(w.cols);
  const int leaf = warp % parts;
  const int64_t row_tile = block * (kWarps / parts) + warp / parts;
  const bool works = row_tile * 16 < w.rows;
  const int64_t units = (w.cols + F::kUnit - 1) / F::kUnit;
  const int first = static_cast<int>(units * leaf / parts) * kPieces;
  const int last = works ? static_cast<int>(units * (leaf + 1) / parts) * kPieces : first;
  float sum[NT][4] = {};
  const auto tokens = [&](const uint4*(&act)[NT]) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int64_t tile = token_tile + j < w.act_tiles ? token_tile + j : w.act_tiles - 1;
      act[j] = reinterpret_cast<const uint4*>(w.act) + tile * w.act_chunks * 32 + lane;
    }
  };
  sum_leaf<F, NT>(sum, w.weights + tile_at<F>(row_tile, w.cols), first, last, tokens);
  if (parts > 1) {
    if (leaf > 0) {
#pragma unroll
      for (int j = 0; j < NT * 4; ++j) shared[warp][j][lane] = sum[j / 4][j % 4];
    }
    __syncthreads();
    if (leaf > 0) return;
    for (int l = 1; l < parts; ++l) {
#pragma unroll
      for (int j = 0; j < NT * 4; ++j) {
        sum[j / 4][j % 4] = __fadd_rn(sum[j / 4][j % 4], shared[warp + l][j][lane]);
      }
    }
  }
  if (!works) return;
  if constexpr (F::kCode == Code::kInt8) {
    const float* scales = int8_scales(w.weights, w.rows, w.cols) + row_tile * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < NT * 4; ++j) {
      sum[j / 4][j % 4] = __fmul_rn(sum[j / 4][j % 4], scales[j % 4 / 2 * 8]);
    }
  }
  finish<NT>(w, sum, row_tile, token_tile, lane);
}

template <class F, int NT>
__global__ void __launch_bounds__(256, NT == 1 ? 3 : 2)
    products_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
  let_next_start();
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const ProductArgs& p = list.of[i];
  const Work w{p.weight.data,    p.weight.rows, p.weight.cols, p.act,  p.act_chunks,
               (tokens + 7) / 8, p.out,         p.out_stride,  tokens, p.bias,
               p.scale,          p.add != 0,    F::kUp};
  if constexpr (kHasOnlyMma<F> || NT == 2) {
    multiply<F, NT>(w, blockIdx.x - list.first_block[i], static_cast<int64_t>(blockIdx.y) * NT);
  }
}

template <class F, int NT>
__global__ void __launch_bounds__(256, NT == 1 ? 3 : 2)
    experts_kernel(const __grid_constant__ ExpertArgs e) {
  // An earlier kernel writes which expert a slot has.
  let_next_start();
  wait();
  const int slot = blockIdx.y;
  const int expert = e.slot_expert[slot];
  if (expert < 0) return;
  const int64_t chunks = (e.cols + kPadCols - 1) / kPadCols * 2;
  const Work w{e.weights[expert],
               e.rows,
               e.cols,
               e.act + slot * NT * chunks * 512,
               chunks,
               NT,
               e.out + static_cast<int64_t>(slot) * NT * 8 * e.rows,
               e.rows,
               NT * 8,
               e.bias != nullptr ? e.bias + expert * e.rows : nullptr,
               1.0f,
               false,
               F::kUp};
  multiply<F, NT>(w, blockIdx.x, 0);
}

// Sets the function attribute at every launch: it costs the host little, and needs no state.
template <class F, class Kernel, class... A>
int launch_ring(const Context& ctx, Kernel kernel, dim3 grid, const A&... args) {
  if (const int error = raise_shared(kernel, WarpStages<F>::kBytes); error != 0) return error;
  return launch(ctx, kernel, grid, dim3(256), WarpStages<F>::kBytes, args...);
}

// By tiles of 8 tokens. The kernels for two tiles also serve block formats on Hopper.
template <class F>
int run_format(const Context& ctx, const ProductList& list, int64_t tokens) {
  const int64_t tiles = ceil_div(tokens, kTokenTile);
  const auto x = static_cast<unsigned>(list.first_block[list.count]);
  if (tiles == 1) return launch_ring<F>(ctx, products_kernel<F, 1>, dim3(x), list, tokens);
  if (tiles == 2) return launch_ring<F>(ctx, products_kernel<F, 2>, dim3(x), list, tokens);
  const auto y = static_cast<unsigned>(ceil_div(tiles, 4));
  return launch_ring<F>(ctx, products_kernel<F, 4>, dim3(x, y), list, tokens);
}

}  // namespace

int run_small_m(const Context& ctx, const ProductList& list, int64_t tokens) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_format(list.of[0].weight.code, [&](auto f) {
    using F = decltype(f);
    if constexpr (F::kCode != Code::kF32 && F::kCode != Code::kInt8) {
      error = run_format<F>(ctx, list, tokens);
    }
  });
  return error;
}

int expert_products(const Context& ctx, const ExpertArgs* e) {
  const dim3 grid(static_cast<unsigned>(blocks_of_slices(e->rows, e->cols)),
                  static_cast<unsigned>(e->slots));
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_format(e->code, [&](auto f) {
    using Stored = decltype(f);
    using F = std::conditional_t<Stored::kCode == Code::kFP8, FP8Values, Stored>;
    error = e->slot_tokens == 8 ? launch_ring<F>(ctx, experts_kernel<F, 1>, grid, *e)
                                : launch_ring<F>(ctx, experts_kernel<F, 4>, grid, *e);
  });
  return error;
}

}  // namespace freshet::cuda

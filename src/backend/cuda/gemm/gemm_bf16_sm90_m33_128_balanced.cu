// GEMM with BF16 weights for 33 to 64 tokens, or up to 128 tokens if there are few rows (Hopper):
// every SM gets the same number of 16-row tiles, whatever that is, so that all SMs read memory
// until the end. (With more tokens and rows, reading the activations again is what costs most.)
//
// A block makes passes over its rows with all tokens: up to 64 rows, of which each of two
// warpgroups takes half of the tokens; or up to 128 rows, of which each takes half; or, with a
// SwiGLU epilogue, one takes gate's rows and the other up's. wgmma computes 64 rows; rows beyond
// the last of a pass are computed and not written. Bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm_bf16_sm90_m33_128_balanced.h"
#include "backend/cuda/gemm/gemm_bf16_sm90_wgmma.cuh"
#include "backend/cuda/gemm/swiglu_epilogue.cuh"

namespace freshet::cuda {
namespace {

enum class Split { kTokens, kRows, kGate };

constexpr int kTileBytes = BF16::kTileBytes;
constexpr int kShareRound = 4;  // token tiles that a SwiGLU epilogue exchanges at a time

// NT: tiles of 8 tokens.
template <int NT, Split split>
struct BalancedShare {
  static constexpr int kProducers = 4;
  static constexpr bool kTokensLead = false;
  static constexpr bool kGate = split == Split::kGate, kTokens = split == Split::kTokens;
  static constexpr int kTiles = split == Split::kRows ? 8 : 4;  // 16-row tiles per pass
  static constexpr int kSums = kTokens ? NT / 2 : NT;           // token tiles per warpgroup
  static constexpr int kRowBytes = kTokens ? 4 * kTileBytes : 8 * kTileBytes;
  static constexpr int kGroupRows = kTokens ? 0 : 4 * kTileBytes;
  static constexpr int kGroupTokens = kTokens ? NT / 2 * kTokenBytes : 0;
  static constexpr int kStageBytes = kRowBytes + NT * kTokenBytes;
  static constexpr int kRoomBytes = kGate ? kExchangeBytes<kShareRound> : 0;
  static constexpr int kStages = (kRingBytes - kRoomBytes) / kStageBytes;
  static constexpr int kRoom = kStages * kStageBytes;
  static constexpr int kBytes = kRoom + kRoomBytes;
};
constexpr int kThreads = kConsumers + kProducerWarps * 32;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Adjacent 16-row tiles, which may extend into a second panel.
struct ShareTiles {
  const uint8_t *first, *second;
  int of_first, of_second;

  __device__ __forceinline__ uint32_t bytes() const { return (of_first + of_second) * kTileBytes; }
  __device__ __forceinline__ void copy(uint8_t* to, int64_t at, uint64_t* barrier) const {
    copy_weights(to, first + at, of_first * kTileBytes, barrier);
    if (of_second > 0)
      copy_weights(to + of_first * kTileBytes, second + at, of_second * kTileBytes, barrier);
  }
};
__device__ __forceinline__ ShareTiles tiles_of(const WeightView& w, int64_t tile, int count) {
  constexpr int kPanel = kPanelTiles<BF16>;
  const int here = min(count, kPanel - static_cast<int>(tile % kPanel));
  return {w.data + tile_at<BF16>(tile, w.cols), w.data + tile_at<BF16>(tile + here, w.cols), here,
          count - here};
}
// Gate's tiles, and up's at a fixed offset.
struct TilesOfTwo {
  ShareTiles gate, up;

  __device__ __forceinline__ uint32_t bytes() const { return gate.bytes() + up.bytes(); }
  __device__ __forceinline__ void copy(uint8_t* to, int64_t at, uint64_t* barrier) const {
    gate.copy(to, at, barrier);
    up.copy(to + 4 * kTileBytes, at, barrier);
  }
};

// A block's row tiles of a GEMM, pass by pass; passes are as even as possible.
struct SharePasses {
  int64_t first;
  int count, most;  // tiles; tiles per pass

  __device__ __forceinline__ int passes() const { return (count + most - 1) / most; }
  __device__ __forceinline__ int begin(int pass) const { return count * pass / passes(); }
};
#endif

// share: 16-row tiles per block. With a SwiGLU epilogue, the list has gate followed by up.
template <int NT, Split split>
__global__ void __launch_bounds__(kThreads, 1)
    share_kernel(const __grid_constant__ ProductList list, int tokens, int share,
                 const __grid_constant__ Activations act) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = BalancedShare<NT, split>;
  extern __shared__ __align__(1024) uint8_t stages[];
  __shared__ uint64_t full[S::kStages], empty[S::kStages];
  let_next_start();
  GemmStages<S> ring = start_ring<S>(stages, full, empty, kConsumers / 32);
  int i = 0;
  while (i + 1 < list.count && static_cast<int>(blockIdx.x) >= list.first_block[i + 1]) ++i;
  const int64_t cols = list.of[i].weight.cols;
  // Columns of the activations are padded to panels of 64.
  const int64_t all =
      S::kGate ? (list.of[i].weight.rows + 63) / 64 * 4 : (list.of[i].weight.rows + 15) / 16;
  const int64_t first = static_cast<int64_t>(blockIdx.x - list.first_block[i]) * share;
  const SharePasses passes{first, static_cast<int>(min(static_cast<int64_t>(share), all - first)),
                           S::kTiles};
  if (warp_index() >= kConsumers / 32) {
    if (threadIdx.x % 32 != 0) return;
    const int token_tiles = (tokens + 7) / 8;
    bool waited = false;
    for (int pass = 0; pass < passes.passes(); ++pass) {
      const int64_t tile = first + passes.begin(pass);
      const int count = passes.begin(pass + 1) - passes.begin(pass);
      const auto from = [&](const auto& rows) {
        fill(ring, rows, list.of[i].act, static_cast<int64_t>(token_tiles) * kTokenBytes,
             min(NT, token_tiles) * kTokenBytes, static_cast<int>((cols + 63) / 64), waited);
      };
      if constexpr (S::kGate) {
        from(TilesOfTwo{tiles_of(list.of[0].weight, tile, count),
                        tiles_of(list.of[1].weight, tile, count)});
      } else {
        from(tiles_of(list.of[i].weight, tile, count));
      }
    }
  } else {
    Reader<S> reader(ring);
    wait();
    const int warp = warp_index(), group = warp / 4;
    for (int pass = 0; pass < passes.passes(); ++pass) {
      const int64_t tile = first + passes.begin(pass), end = first + passes.begin(pass + 1);
      float total[S::kSums][4];
      sum_leaves<S, S::kSums>(reader, total, cols);
      if constexpr (S::kGate) {
        finish_gated<NT, kShareRound>(act, list.of[group], total,
                                      reinterpret_cast<float4*>(stages + S::kRoom), tile, end, 0);
      } else {
        Work w = work_of(list.of[i], tokens);
        w.rows = min(w.rows, end * 16);
        finish<S::kSums>(w, total, tile + (S::kTokens ? warp % 4 : warp),
                         S::kTokens ? group * S::kSums : 0, static_cast<int>(threadIdx.x % 32));
      }
    }
  }
#endif
}

template <int NT, Split split>
int launch_share(const Context& ctx, const ProductList& list, int64_t tokens, int share,
                 const Activations& act) {
  using S = BalancedShare<NT, split>;
  const auto kernel = share_kernel<NT, split>;
  if (const int error = raise_shared(kernel, S::kBytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(list.first_block[list.count])),
                dim3(kThreads), S::kBytes, list, static_cast<int>(tokens), share, act);
}

}  // namespace

static_assert(BalancedShare<16, Split::kTokens>::kTiles == kBalancedTiles);

int run_share(const Context& ctx, const ProductList& given, int64_t tokens) {
  ProductList list = given;
  const int share = even_share(ctx, list);
  if (tokens > 64) return launch_share<16, Split::kTokens>(ctx, list, tokens, share, {});
  return share <= BalancedShare<8, Split::kTokens>::kTiles
             ? launch_share<8, Split::kTokens>(ctx, list, tokens, share, {})
             : launch_share<8, Split::kRows>(ctx, list, tokens, share, {});
}

int run_share_gated(const Context& ctx, const ProductList& gate_and_up, int64_t tokens,
                    const Activations& act) {
  ProductList list = gate_and_up;
  list.count = 1;  // up has the same rows, and isn't counted
  const int64_t rows = list.of[0].weight.rows;
  list.of[0].weight.rows = ceil_div(rows, 64) * 64;
  const int share = even_share(ctx, list);
  list.of[0].weight.rows = rows;
  return launch_share<8, Split::kGate>(ctx, list, tokens, share, act);
}

}  // namespace freshet::cuda

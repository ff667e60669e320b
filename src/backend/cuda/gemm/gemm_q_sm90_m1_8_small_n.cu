// GEMM with quantised weights for up to eight tokens (Hopper), for few rows and 2,048 to 8,192
// columns: a block requests all of its weights at once.
//
// Each SM runs two blocks, with one or two tiles of 16 rows each. K is cut into eight split-K
// slices by the number of columns alone, one per warp. Slices of the usual sizes are unrolled:
// their first pieces are decoded into registers before the previous kernel ends. Slices of other
// sizes take a short loop. While a block waits for the previous kernel it may prefetch the weights
// of the next GEMM into L2. Slices are added from left to right, by one warp per tile;
// bit-identical to gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_epilogue.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_small_n.h"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kEarly = 2;       // pieces of the first slice decoded ahead
constexpr int kLeafPieces = 8;  // pieces whose activations a lane has in registers
constexpr int kMost = 2;        // tiles per block, if they fit

// kLeaf: pieces of a split-K slice.
template <class F, int kLeaf = kLeafPieces>
struct Once {
  static constexpr int kPieces = F::kUnit / 64;  // per unit
  static constexpr int kLeafBytes = kLeaf / kPieces * F::kTileBytes;
  static constexpr int kRowBytes = kWarps * kLeafBytes;        // per tile
  static constexpr int kAhead = kAheadBytes / 2 / kLeafBytes;  // slices in flight
  static constexpr bool kWhole = kLeaf % kPieces == 0 && (kPieces == 1 || kLeaf == kLeafPieces);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Prefetches the next GEMM's weights to L2 until the previous kernel has ended, since memory is
// idle until then. One part of both matrices at a time, `step` apart, so that other kernels' loads
// don't queue. These are bulk copies to a scratch buffer that nobody reads: lines fetched by
// prefetch instructions were read hardly faster than from memory. Returns the number of parts; the
// barrier completes when the last has landed. Called by one thread.
__device__ __forceinline__ int bring(const NextWeights& next, int first, int step, uint8_t* place,
                                     uint64_t* barrier, const volatile int& ended) {
  int times = 0;
  for (int part = first; part < next.parts && ended == 0; part += step, ++times) {
    barrier_expect(barrier, 2 * kNextPart);
    bulk_copy(place, next.from[0] + int64_t{part} * kNextPart, kNextPart, barrier);
    bulk_copy(place, next.from[1] + int64_t{part} * kNextPart, kNextPart, barrier);
    landed(barrier, ended, times % 2);
  }
  return times;
}
#endif

// A block's second tile may be in format G.
template <class F, class G, int kLeaf>
__global__ void __launch_bounds__(256, 2)
    once_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Once<F, kLeaf>;
  constexpr bool kTwo = F::kCode != G::kCode;
  extern __shared__ __align__(128) uint8_t tiles[];
  __shared__ uint64_t full[kMost][kWarps], near[kWarps];
  __shared__ float4 sums[kMost][kWarps][32];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int blocks = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  const int count = first + blocks < list.first_block[list.count] ? 2 : 1;
  if (threadIdx.x < kMost * kWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x < kWarps) barrier_init(&near[threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  uint8_t* mine = tiles + warp * R::kLeafBytes;
  const auto in_other = [&](int product) { return list.of[product].weight.code == G::kCode; };
  const auto second_of = [&](int leaf_bytes) { return tiles + R::kRowBytes + warp * leaf_bytes; };
  if (lane == 0) {
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const int index = first + t * blocks, i = product_of(list, index);
      const int bytes = kTwo && in_other(i) ? Once<G, kLeaf>::kLeafBytes : R::kLeafBytes;
      const uint8_t* from =
          list.of[i].weight.data +
          (static_cast<int64_t>(index - list.first_block[i]) * kWarps + warp) * bytes;
      const int before = t * kWarps + warp - R::kAhead;
      if (warp > 0 && before >= 0) landed(&full[0][before], ended);
      barrier_expect(&full[t][warp], bytes);
      copy_weights(t == 0 ? mine : second_of(bytes), from, bytes, &full[t][warp]);
    }
  }
  // Lanes of tokens beyond the last read another token.
  const auto* act = known(reinterpret_cast<const uint4*>(list.of[0].act) + warp * kLeaf * 64 +
                          (lane / 4 < tokens ? lane : lane % 4));
  const int end_index = first + (warp < count ? warp : 0) * blocks;
  const int product = product_of(list, end_index);
  const End to(list, product, end_index - list.first_block[product], lane, tokens);
  const auto take = [&](auto f, const uint8_t* tile, int i, uint4(&a)[4], Piece& piece) {
    using Its = decltype(f);
    constexpr int kPieces = Once<Its>::kPieces;
    Its::template load<FromShared>(tile + i / kPieces * Its::kTileBytes, i % kPieces, lane, piece);
    Its::decode(piece, i % kPieces, lane, a);
  };
  __syncwarp();
  uint4 ahead[kEarly][4];
  Piece pieces[kEarly];
  const auto decode_first = [&] {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      take(F{}, mine, i, ahead[i], pieces[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) keep(ahead[i][k]);
    }
  };
  // Warp 0 waits for the previous kernel instead.
  const bool early = warp > 0 && __all_sync(0xffffffff, landed(&full[0][warp], ended));
  if (early) decode_first();
  int brought = 0;
  if (warp > 0 && lane == 0) {
    constexpr int kOthers = kWarps - 1;
    brought = bring(list.next, first * kOthers + warp - 1, blocks * kOthers, tiles + R::kRowBytes,
                    &near[warp], ended);
  }
  __syncwarp();
  wait();
  if (threadIdx.x == 0) ended = 1;
  constexpr int kKept = kLeaf < kLeafPieces ? kLeaf : kLeafPieces;
  uint4 b[kKept][1][2];
  const auto load_tokens = [&](int i) {
    b[i % kKept][0][0] = act[i * 64];
    b[i % kKept][0][1] = act[i * 64 + 32];
  };
  // Longer slices: activations of later pieces replace used ones, and are reloaded for the second
  // tile.
  const auto load_others = [&](int i) {
    if (i + kKept < kLeaf) load_tokens(i + kKept);
    if (i >= kKept) load_tokens(i - kKept);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) load_tokens(i);
  float before[4];
  if (warp < count && to.real >= 16) to.load(before);
  if (!early) {
    barrier_wait(&full[0][warp], 0);
    decode_first();
  }
  float sum[1][4] = {};
#pragma unroll
  for (int i = 0; i < kEarly; ++i) {
    accumulate<F, 1>(sum, ahead[i], b[i], pieces[i], i % R::kPieces);
    load_others(i);
  }
#pragma unroll
  for (int i = kEarly; i < kLeaf; ++i) {
    Piece piece;
    uint4 a[4];
    take(F{}, mine, i, a, piece);
    accumulate<F, 1>(sum, a, b[i % kKept], piece, i % R::kPieces);
    load_others(i);
  }
  if (brought > 0) barrier_wait(&near[warp], (brought - 1) % 2);
  sums[0][warp][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
  if (count > 1) {
    float second[1][4] = {};
    barrier_wait(&full[1][warp], 0);
    const auto take_second = [&](auto f) {
      using Its = decltype(f);
#pragma unroll
      for (int i = 0; i < kLeaf; ++i) {
        Piece piece;
        uint4 a[4];
        take(f, second_of(Once<Its, kLeaf>::kLeafBytes), i, a, piece);
        accumulate<Its, 1>(second, a, b[i % kKept], piece, i % Once<Its>::kPieces);
        if (i + kKept < kLeaf) load_tokens(i + kKept);
      }
    };
    if (kTwo && in_other(product_of(list, first + blocks))) {
      take_second(G{});
    } else {
      take_second(F{});
    }
    sums[1][warp][lane] = make_float4(second[0][0], second[0][1], second[0][2], second[0][3]);
  }
  __syncthreads();
  if (warp >= count) return;
  float all[4];
  add_leaves(all, sums[warp]);
  to.put(all, before, kTwo && in_other(product) ? G::kUp : F::kUp);
#endif
}

// The same for any number of columns; slices may have two sizes.
template <class F, class G>
__global__ void __launch_bounds__(256, 2)
    any_once_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr bool kTwo = F::kCode != G::kCode;
  extern __shared__ __align__(128) uint8_t tiles[];
  __shared__ uint64_t full[kMost][kWarps], near[kWarps];
  __shared__ float4 sums[kMost][kWarps][32];
  __shared__ volatile int ended;  // set once the previous kernel has ended
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int blocks = static_cast<int>(gridDim.x), first = static_cast<int>(blockIdx.x);
  const int count = first + blocks < list.first_block[list.count] ? 2 : 1;
  if (threadIdx.x < kMost * kWarps) {
    barrier_init(&full[0][threadIdx.x], 1);
    if (threadIdx.x < kWarps) barrier_init(&near[threadIdx.x], 1);
    if (threadIdx.x == 0) ended = 0;
    barriers_ready();
  }
  __syncthreads();
  const int64_t cols = list.of[0].weight.cols;  // the same for all
  const LeafWalk<F> walk(cols, warp);
  const auto row_bytes = static_cast<int>(tile_at<F>(1, cols));
  const auto in_other = [&](int product) { return list.of[product].weight.code == G::kCode; };
  const auto place = [&](auto f, int t) {
    return tiles + t * row_bytes + walk.first * decltype(f)::kTileBytes;
  };
  if (lane == 0) {
    const int leaf_bytes = walk.units * F::kTileBytes;
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const int index = first + t * blocks, i = product_of(list, index);
      const int before = t * kWarps + warp - kAheadBytes / 2 / leaf_bytes;
      if (warp > 0 && before >= 0) landed(&full[0][before], ended);
      const auto ask = [&](auto f) {
        using Its = decltype(f);
        const auto bytes = static_cast<uint32_t>(walk.units * Its::kTileBytes);
        barrier_expect(&full[t][warp], bytes);
        copy_weights(place(f, t),
                     list.of[i].weight.data + tile_at<Its>(index - list.first_block[i], cols) +
                         static_cast<int64_t>(walk.first) * Its::kTileBytes,
                     bytes, &full[t][warp]);
      };
      if (kTwo && in_other(i)) {
        ask(G{});
      } else {
        ask(F{});
      }
    }
  }
  // Lanes of tokens beyond the last read another token.
  const auto* act =
      known(reinterpret_cast<const uint4*>(list.of[0].act) + walk.first * Once<F>::kPieces * 64 +
            (lane / 4 < tokens ? lane : lane % 4));
  const int end_index = first + (warp < count ? warp : 0) * blocks;
  const int product = product_of(list, end_index);
  const End to(list, product, end_index - list.first_block[product], lane, tokens);
  // All tiles share one short loop: code that runs once would have to be fetched first.
  TokenPair b;
  b.act = act;
  const auto add_tile = [&](auto f, int t) {
    using Its = decltype(f);
    float sum[1][4] = {};
    int at = 0;
#pragma unroll 1
    for (int stage = 0; stage < walk.stages; ++stage) {
      const int units = walk.count(stage), upto = at + units * Once<Its>::kPieces;
      const int next = stage + 1 < walk.stages ? upto : 0;
      add_stage<Its>(sum, b, place(f, t) + at / Once<Its>::kPieces * Its::kTileBytes, upto - at, at,
                     next, lane);
      at = next;
    }
    sums[t][warp][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
  };
  int brought = 0;
  if (warp > 0 && lane == 0) {
    constexpr int kOthers = kWarps - 1;
    brought = bring(list.next, first * kOthers + warp - 1, blocks * kOthers, tiles + row_bytes,
                    &near[warp], ended);
  }
  __syncwarp();
  wait();
  if (threadIdx.x == 0) ended = 1;
  b.load(0, 0);
  b.load(1, 1);
  float before[4];
  if (warp < count && to.real >= 16) to.load(before);
#pragma unroll 1
  for (int t = 0; t < count; ++t) {
    barrier_wait(&full[t][warp], 0);
    if (kTwo && in_other(product_of(list, first + t * blocks))) {
      add_tile(G{}, t);
    } else {
      add_tile(F{}, t);
    }
  }
  if (brought > 0) barrier_wait(&near[warp], (brought - 1) % 2);
  __syncthreads();
  if (warp >= count) return;
  float all[4];
  add_leaves(all, sums[warp]);
  to.put(all, before, kTwo && in_other(product) ? G::kUp : F::kUp);
#endif
}

// Grid: two blocks per SM, or one per tile in F if these are fewer; tiles in G are second tiles.
template <class F, class G, int... kLeafs>
int launch_once(const Context& ctx, std::integer_sequence<int, kLeafs...>, ProductList list,
                int64_t tokens, int tiles_of_first) {
  const int tiles = list.first_block[list.count];
  const int most = min(2 * ctx.multiprocessors, tiles_of_first);
  const int64_t cols = list.of[0].weight.cols, row = tile_at<F>(1, cols);
  const int64_t second = tiles > most ? max(row, tile_at<G>(1, cols)) : 0;
  if (second > 0) list.next = {};  // its buffer holds the second tile
  const int64_t bytes = row + (list.next.parts > 0 ? kNextPart : second);
  auto kernel = any_once_kernel<F, G>;
  const auto choose = [&](auto leaf) {
    constexpr int kLeaf = decltype(leaf)::value;
    if constexpr (Once<F, kLeaf>::kWhole) {
      if (cols == kWarps * kLeaf * 64) kernel = once_kernel<F, G, kLeaf>;
    }
  };
  (choose(std::integral_constant<int, kLeafs>{}), ...);
  if (const int error = raise_shared(kernel, static_cast<size_t>(bytes)); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(tiles < most ? tiles : most)), dim3(256),
                static_cast<size_t>(bytes), list, tokens);
}

}  // namespace

template <class F>
int run_once(const Context& ctx, const ProductList& list, int64_t tokens) {
  static_assert(F::kTileBytes == tile_bytes(F::kCode) && F::kUnit == unit_of(F::kCode));
  static_assert(kOneShotShared == kSharedOfSm && kOneShotNext == kNextPart);
  return launch_once<F, F>(ctx, UsualLeaves{}, list, tokens, list.first_block[list.count]);
}

// Some blocks' second tiles are in Q6_K.
template <class F>
int run_once_pair(const Context& ctx, const ProductList& list, int64_t tokens) {
  int tiles = 0;  // in F
  for (int i = 0; i < list.count && list.of[i].weight.code == F::kCode; ++i) {
    tiles = list.first_block[i + 1];
  }
  return launch_once<F, Q6_K>(ctx, UsualLeaves{}, list, tokens, tiles);
}
template int run_once_pair<Q4_K>(const Context&, const ProductList&, int64_t);
template int run_once_pair<Q5_K>(const Context&, const ProductList&, int64_t);
#define FRESHET_ONCE(F) template int run_once<F>(const Context&, const ProductList&, int64_t);
FRESHET_ONCE(Q8_0)
FRESHET_ONCE(Q4_0)
FRESHET_ONCE(Q4_K)
FRESHET_ONCE(Q6_K)
FRESHET_ONCE(MXFP4)
FRESHET_ONCE(Int4G128)
FRESHET_ONCE(Int4G32)
FRESHET_ONCE(Q5_K)
FRESHET_ONCE(Q3_K)
FRESHET_ONCE(IQ4_XS)
FRESHET_ONCE(IQ4_NL)
FRESHET_ONCE(Q5_0)
FRESHET_ONCE(Q4_1)
FRESHET_ONCE(Q5_1)
FRESHET_ONCE(Q2_K)
#undef FRESHET_ONCE

}  // namespace freshet::cuda

// Products of quantised weights with up to eight tokens on Hopper, of few rows of 4,096 columns:
// all of them come at once.
//
// Two blocks a multiprocessor have a tile of 16 rows each, or two, and each of a block's eight
// warps a leaf. All weights are asked for at the start; the first pieces are values in registers
// before the kernel in front has ended, and then weights that come next are brought near. Tiles end
// together, a warp each. The bits are those of gemm_sm80_small_m.cu.
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/gemm/gemm_q_sm90_m1_8_epilogue.cuh"
#include "backend/cuda/gemm/prefetch_weights.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kLeafPieces = 8, kEarly = 2;  // of the first leaf, ahead
constexpr int64_t kOnceCols = kWarps * kLeafPieces * 64;
constexpr int kMost = 2;                 // tiles of a block, where there is room for them
constexpr int kBeside = 9 * 1024 + 512;  // of a block's shared memory: sums, barriers, its own

template <class F>
struct Once {
  static constexpr int kPieces = F::kUnit / 64;  // of a unit
  static constexpr int kLeafBytes = kLeafPieces / kPieces * F::kTileBytes;
  static constexpr int kRowBytes = kWarps * kLeafBytes;        // of a tile
  static constexpr int kAhead = kAheadBytes / 2 / kLeafBytes;  // leaves in flight
  static constexpr int kTiles = 2 * (kMost * kRowBytes + kBeside) <= kSharedOfSm ? kMost : 1;
  static_assert(kPieces <= 4 && 2 * (kTiles * kRowBytes + kBeside) <= kSharedOfSm);
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Brings what comes next near, to L2, until the kernel in front has ended: memory has time. A part
// of both matrices at a time, `step` apart, since other kernels' loads are on their way. These are
// copies to a place that nobody reads, as what prefetches bring is read hardly faster than from
// memory. How many times; the barrier knows when the last are there. One thread.
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

// A block's second tile may be in G.
template <class F, class G = F>
__global__ void __launch_bounds__(256, 2)
    once_kernel(const __grid_constant__ ProductList list, int64_t tokens) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using R = Once<F>;
  constexpr bool kTwo = F::kCode != G::kCode;
  extern __shared__ __align__(128) uint8_t tiles[];
  __shared__ uint64_t full[kMost][kWarps], near[kWarps];
  __shared__ float4 sums[kMost][kWarps][32];
  __shared__ volatile int ended;  // the kernel in front
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
      const int bytes = kTwo && in_other(i) ? Once<G>::kLeafBytes : R::kLeafBytes;
      const uint8_t* from =
          list.of[i].weight.data +
          (static_cast<int64_t>(index - list.first_block[i]) * kWarps + warp) * bytes;
      const int before = t * kWarps + warp - R::kAhead;
      if (warp > 0 && before >= 0) landed(&full[0][before], ended);
      barrier_expect(&full[t][warp], bytes);
      copy_weights(t == 0 ? mine : second_of(bytes), from, bytes, &full[t][warp]);
    }
  }
  // Lanes of tokens that are not there read another's.
  const auto* act = known(reinterpret_cast<const uint4*>(list.of[0].act) + warp * kLeafPieces * 64 +
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
  // Warp 0 waits for the kernel in front.
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
  uint4 b[kLeafPieces][1][2];
#pragma unroll
  for (int i = 0; i < kLeafPieces; ++i) {
    b[i][0][0] = act[i * 64];
    b[i][0][1] = act[i * 64 + 32];
  }
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
  }
#pragma unroll
  for (int i = kEarly; i < kLeafPieces; ++i) {
    Piece piece;
    uint4 a[4];
    take(F{}, mine, i, a, piece);
    accumulate<F, 1>(sum, a, b[i], piece, i % R::kPieces);
  }
  if (brought > 0) barrier_wait(&near[warp], (brought - 1) % 2);
  sums[0][warp][lane] = make_float4(sum[0][0], sum[0][1], sum[0][2], sum[0][3]);
  if (count > 1) {
    float second[1][4] = {};
    barrier_wait(&full[1][warp], 0);
    const auto take_second = [&](auto f) {
      using Its = decltype(f);
#pragma unroll
      for (int i = 0; i < kLeafPieces; ++i) {
        Piece piece;
        uint4 a[4];
        take(f, second_of(Once<Its>::kLeafBytes), i, a, piece);
        accumulate<Its, 1>(second, a, b[i], piece, i % Once<Its>::kPieces);
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

template <class F, class G = F>
int launch_once(const Context& ctx, ProductList list, int64_t tokens) {
  const int tiles = list.first_block[list.count], most = 2 * ctx.multiprocessors;
  const int second = tiles > most ? max(Once<F>::kRowBytes, Once<G>::kRowBytes) : 0;
  if (second > 0) list.next = {};  // its place is the second tile's
  const int bytes = Once<F>::kRowBytes + (list.next.parts > 0 ? kNextPart : second);
  const auto kernel = once_kernel<F, G>;
  if (const int error = raise_shared(kernel, bytes); error != 0) return error;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(tiles < most ? tiles : most)), dim3(256),
                static_cast<size_t>(bytes), list, tokens);
}

}  // namespace

template <class F>
int run_once(const Context& ctx, const ProductList& list, int64_t tokens) {
  static_assert((Once<F>::kTiles == 2) == ((kTwoRows & bit(F::kCode)) != 0));
  static_assert(kOnceCols == kOneShotCols);
  return launch_once<F>(ctx, list, tokens);
}

// Some of the blocks' second tiles are in Q6_K.
template <class F>
int run_once_pair(const Context& ctx, const ProductList& list, int64_t tokens) {
  constexpr int kBytes = Once<F>::kRowBytes + Once<Q6_K>::kRowBytes + kBeside;
  static_assert(2 * kBytes <= kSharedOfSm);
  return launch_once<F, Q6_K>(ctx, list, tokens);
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

// Products of FP8 weights (E4M3) with more than 64 tokens on Hopper; the order of a sum is that of
// products_fp8.cu, and its bits. A block goes from tile to tile of the product.
#include <algorithm>

#include "backend/cuda/products_fp8_lines.cuh"
#include "backend/cuda/products_fp8_many.cuh"

namespace freshet::cuda {
namespace {

// With two warpgroups others write the sums of a tile while these go on to the next one: where they
// meet, and how many warps write.
template <int G, int NT>
struct Many : Fp8Shape<G, NT> {
  static constexpr int kWriters = G == 2 ? 4 : 0;
  static constexpr int kThreads = Fp8Shape<G, NT>::kThreads + kWriters * 32;
  static constexpr int kStride = NT * 8 + 8;  // numbers a token: no bank has two of a half warp's
  static constexpr int kDeskBytes = kWriters > 0 ? G * 64 * kStride * 4 : 0;
  static constexpr int kRingBytes = kManyBytes - kDeskBytes;
  static_assert(kRingBytes / ((G * 8 + NT) * kE4M3TileBytes) >= kProducers);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Desk {
  float* sums;             // [token][kStride]
  uint64_t *there, *free;  // a tile's sums
};

template <int NT>
__device__ __forceinline__ void hand_over(const Desk& desk, const float (&sum)[NT][4]) {
  constexpr int kStride = Many<2, NT>::kStride;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float* to = desk.sums + (warp_index() * 16 + lane / 4) * kStride + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    *reinterpret_cast<float2*>(to + j * 8) = make_float2(sum[j][0], sum[j][1]);
    *reinterpret_cast<float2*>(to + 8 * kStride + j * 8) = make_float2(sum[j][2], sum[j][3]);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(desk.there);
}

// G warpgroups.
template <int G, int NT>
__device__ __forceinline__ void fp8_walk(const Fp8Ring& of, const ProductList& list, int64_t tokens,
                                         const Tour& tour, const Desk& desk) {
  Fp8Reader ring = fp8_reader(of);
  int product = 0;
  Fp8Noted<NT> noted;
  const auto look_up = [&](int index) {
    const ProductTile tile =
        many_tile<G, NT>(list, tokens, tour, index < tour.tiles ? index : tour.first);
    const WeightView& w = list.of[tile.product].weight;
    noted.look_up([&](int j) { return scaled_panel(w, (tile.unit + j) / 8); });
    product = tile.product;
  };
  look_up(tour.first);
  wait();
  int parity = 1;
  for (int index = tour.first; index < tour.tiles; index += tour.step, parity ^= 1) {
    const WeightView& weight = list.of[product].weight;
    const Fp8Scaled scaled = noted.scaled();
    float sum[NT][4];
    fp8_as(scaled, [&](auto how) {
      constexpr Fp8Scaled::How kHow = decltype(how)::value;
      const uint32_t of_rows = scaled.rows_of<kHow>();
      if constexpr (G == 2) {
        fp8_sum_ahead<NT, kHow>(ring, sum, leaf_cut(weight), of_rows);
      } else {
        float last[NT][4];
        fp8_leaves<NT, kHow>(
            ring, sum, last, weight, {0, leaves8(weight)}, true, of_rows, [] {},
            [&](const uint8_t* rows) {
              if (kHow != Fp8Scaled::kSteps) fp8_scale<NT>(sum, rows, of_rows);
            });
      }
    });
    look_up(index + tour.step);
    if constexpr (Many<G, NT>::kWriters > 0) {
      if (index != tour.first) barrier_wait(desk.free, parity);
      hand_over<NT>(desk, sum);
    } else {
      const ProductTile tile = many_tile<G, NT>(list, tokens, tour, index);
      fp8_finish<NT>(list.of[tile.product], tokens, sum, tile);
    }
  }
}

// Those of a pair of blocks.
template <int NT>
__device__ __forceinline__ void fp8_walk_pair(const Fp8Ring& of, const Fp8Facts* told,
                                              const Tour& tour, const Desk& desk) {
  Fp8Reader ring = fp8_reader(of);
  wait();
  int parity = 1;
  for (int index = tour.first; index < tour.tiles; index += tour.step, parity ^= 1) {
    ring.wait_full();
    const Fp8Facts facts = facts_at(told, ring);
    const LeafCut cut{facts.of[0], facts.of[1]};
    const Fp8Scaled scaled{static_cast<Fp8Scaled::How>(facts.of[2]),
                           static_cast<uint32_t>(facts.of[3])};
    float sum[NT][4];
    fp8_as(scaled, [&](auto how) {
      constexpr Fp8Scaled::How kHow = decltype(how)::value;
      fp8_sum_ahead<NT, kHow>(ring, sum, cut, scaled.rows_of<kHow>());
    });
    if (index != tour.first) barrier_wait(desk.free, parity);
    hand_over<NT>(desk, sum);
  }
}

// A warp's share of a block's tiles: every so manieth token.
template <int G, int NT>
__device__ __forceinline__ void fp8_write(const ProductList& list, int64_t tokens, const Tour& tour,
                                          const Desk& desk, int writer) {
  using S = Many<G, NT>;
  constexpr int kAtOnce = 4, kStep = S::kWriters;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int parity = 0;
  wait();
  for (int index = tour.first; index < tour.tiles; index += tour.step, parity ^= 1) {
    const ProductTile tile = many_tile<G, NT>(list, tokens, tour, index);
    const ProductArgs& p = list.of[tile.product];
    const int64_t row = tile.unit * 8 + lane * 4;
    const Four of = four_of(p, row, lane * 4 < NT * 8);
    float* out = p.out + tile.token_tile * 8 * p.out_stride + row;
    const auto count =
        static_cast<int>(min(static_cast<int64_t>(G * 64), tokens - tile.token_tile * 8));
    barrier_wait(desk.there, parity);
    for (int t = writer; t < count && of.count > 0; t += kAtOnce * kStep) {
      float4 before[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = t + i * kStep;
        if (p.add != 0 && at < count) before[i] = load_some(out + at * p.out_stride, of);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = t + i * kStep;
        if (at >= count) break;
        const float4 sum = *reinterpret_cast<const float4*>(desk.sums + at * S::kStride + lane * 4);
        write_some(out + at * p.out_stride, p, of, sum, before[i]);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(desk.free);
  }
}
#endif

// kPair: two blocks of a cluster share the rows.
template <int G, int NT, bool kPair>
__global__ void __launch_bounds__(Many<G, NT>::kThreads, 1)
    fp8_kernel(const __grid_constant__ ProductList list, int64_t tokens, int tiles,
               Fp8Stages stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Many<G, NT>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages], there, free;
  constexpr int blocks = kPair ? 2 : 1;
  let_next_start();
  if (S::kWriters > 0 && threadIdx.x == S::kConsumers) {
    barrier_init(&there, S::kConsumers / 32);
    barrier_init(&free, S::kWriters);
  }
  __shared__ Fp8Facts facts[kPair ? kMostStages : 1];
  const Fp8Ring ring = fp8_ring<S>(stages, shared, full, empty, blocks);
  const Desk desk{reinterpret_cast<float*>(shared + S::kRingBytes), &there, &free};
  const Tour tour = tour_of(tiles, blocks);
  if (blocks > 1) cluster_meet();
  const int other = warp_index() - S::kConsumers / 32;
  if (other >= kProducers) {
    if constexpr (S::kWriters > 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
      fp8_write<G, NT>(list, tokens, tour, desk, other - kProducers);
    }
  } else if (other >= 0) {
    if constexpr (G == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x % 32 == 0) {
      if constexpr (kPair) {
        fp8_produce_pair<G>(ring, facts, list, tokens, tour, other);
      } else {
        fp8_produce<G, NT>(ring, list, tokens, tour, other);
      }
    }
  } else {
    if constexpr (G == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    if constexpr (kPair) {
      fp8_walk_pair<NT>(ring, facts, tour, desk);
    } else {
      fp8_walk<G, NT>(ring, list, tokens, tour, desk);
    }
  }
  if (blocks > 1) cluster_meet();
#endif
}

template <int G, int NT, bool kPair>
int launch_as(const ProductList& given, int64_t tokens) {
  using S = Many<G, NT>;
  const ProductList list = with_blocks(given, NT * 8);
  const auto kernel = fp8_kernel<G, NT, kPair>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kManyBytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  constexpr int blocks = kPair ? 2 : 1;
  const auto tiles =
      static_cast<int>(list.first_block[list.count] * ceil_div(tokens, blocks * G * 64));
  const int most = multiprocessors / blocks, clusters = tiles < most ? tiles : most;
  return launch_cluster(kernel, dim3(static_cast<unsigned>(clusters * blocks)), dim3(S::kThreads),
                        kManyBytes, dim3(static_cast<unsigned>(blocks)), list, tokens, tiles,
                        fp8_stages<G, NT>(tokens, S::kRingBytes));
}
template <int G, int NT>
int launch_fp8(const ProductList& list, int64_t tokens) {
  if constexpr (G == 2 && NT == 16) {
    if (tokens > G * 64) return launch_as<G, NT, true>(list, tokens);
  }
  return launch_as<G, NT, false>(list, tokens);
}

// A way to cut a product: so many warpgroups of tokens and tiles of 8 rows a block.
struct Way {
  int groups, tiles;
  int (*launch)(const ProductList& list, int64_t tokens);
};
constexpr Way kWays[] = {
    {1, 6, launch_fp8<1, 6>},
    {1, 8, launch_fp8<1, 8>},
    {2, 14, launch_fp8<2, 14>},
    {2, 16, launch_fp8<2, 16>},
};

// About how many cycles all steps of 128 columns take: each is multiplied, comes from memory (its
// weights) or the L2 cache (all of it), or is waited for.
int64_t cost(const Way& way, const ProductList& list, int64_t tokens) {
  constexpr int64_t kMemory = 20, kCache = 45, kLeast = 260;  // bytes a cycle, cycles
  int64_t tiles = 0;
  for (int i = 0; i < list.count; ++i) tiles += ceil_div(list.of[i].weight.rows, way.tiles * 8);
  const int64_t blocks = way.groups == 2 && way.tiles == 16 && tokens > 128 ? 2 : 1;
  tiles *= ceil_div(tokens, way.groups * 64 * blocks);
  const int64_t act_tiles = ceil_div(tokens, kTokenTile), most = way.groups * 8;
  const int64_t of_rows = way.tiles * kE4M3TileBytes / blocks;
  const int64_t of_tokens = (act_tiles < most ? act_tiles : most) * kE4M3TileBytes;
  int64_t cycles = std::max<int64_t>(kLeast, way.groups * way.tiles * 17);
  cycles = std::max(cycles, (of_rows + of_tokens) / kCache);
  if (act_tiles <= most) cycles = std::max(cycles, of_rows / kMemory);
  return ceil_div(tiles, multiprocessors / blocks) * cycles;
}

}  // namespace

bool fp8_wide_fits(const ProductList& list, int64_t tokens) {
  int64_t tiles = 0;
  bool whole = true;
  for (int i = 0; i < list.count; ++i) {
    tiles += ceil_div(list.of[i].weight.rows, 128);
    whole = whole && whole_in_k(list.of[i].weight.rows);
  }
  if (whole) return tokens <= 64;
  const int64_t places = ceil_div(tiles, multiprocessors) * multiprocessors;
  return tokens <= 64 && tiles >= 2 * multiprocessors && tiles * 10 >= places * 9;
}

int run_fp8_wide(const ProductList& list, int64_t tokens) {
  return launch_fp8<1, 16>(list, tokens);
}

int run_fp8_many(const ProductList& list, int64_t tokens) {
  const Way* best = nullptr;
  for (const Way& way : kWays) {
    if (best == nullptr || cost(way, list, tokens) < cost(*best, list, tokens)) best = &way;
  }
  return best->launch(list, tokens);
}

}  // namespace freshet::cuda
